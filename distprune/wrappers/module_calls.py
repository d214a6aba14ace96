"""Calls of all modules: torch's global hooks, and what its handles leave behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as modules_of_torch


@contextlib.contextmanager
def observed_calls(
    begin: Callable[[nn.Module], None],
    returned: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None],
    end: Callable[[nn.Module], None],
) -> Iterator[None]:
    """Observe the calls of all modules in this thread; modules and their copies have no hooks.

    Args:
        begin: a call begins, before all hooks of the module; an error stops it.
        returned: its forward returned; with what it was called, as hooks of the module had changed
            it.
        end: a call ends, before hooks that run after a forward; also after an Exception, be it of
            ``returned``.
    """
    thread = threading.get_ident()

    def here(call: Callable[..., None]) -> Callable[..., None]:
        def hook(module: nn.Module, *args: Any) -> None:
            if threading.get_ident() == thread:
                call(module, *args)

        return hook

    before, after = here(lambda module, _: begin(module)), here(lambda *args: returned(*args[:3]))
    handles = [
        modules_of_torch.register_module_forward_pre_hook(before),
        modules_of_torch.register_module_forward_hook(after, with_kwargs=True),
        modules_of_torch.register_module_forward_hook(here(lambda m, *_: end(m)), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
            # Handles forget this one, and torch.compile would warn of global hooks for ever.
            modules_of_torch._global_forward_hooks_with_kwargs.pop(handle.id, None)
