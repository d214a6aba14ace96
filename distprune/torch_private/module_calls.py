"""Calls of all modules: torch's global hooks, and what its handles leave behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import nn
from torch.nn.modules import module as modules_of_torch


class CallObserver(Protocol):
    """What is called at each call of a module, in one thread."""

    def begin(self, module: nn.Module) -> None:
        """A call begins, before all hooks of the module; an error stops it."""

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Its forward returned; with what it was called, as hooks of the module had changed it."""

    def end(self, module: nn.Module) -> None:
        """A call ends, before hooks that run after a forward; also by an error, be it of see()."""


@contextlib.contextmanager
def observed_calls(observer: CallObserver) -> Iterator[None]:
    """Observe the calls of all modules in this thread; modules and their copies have no hooks.

    An error that is no Exception, such as KeyboardInterrupt, ends calls without ``end``.
    """
    thread = threading.get_ident()

    def begin(module: nn.Module, _: object) -> None:
        if threading.get_ident() == thread:
            observer.begin(module)

    def see(module: nn.Module, args: Any, kwargs: Mapping[str, Any], _: object) -> None:
        if threading.get_ident() == thread:
            observer.see(module, args, kwargs)

    def end(module: nn.Module, *_: object) -> None:
        if threading.get_ident() == thread:
            observer.end(module)

    handles = [
        modules_of_torch.register_module_forward_pre_hook(begin),
        modules_of_torch.register_module_forward_hook(see, with_kwargs=True),
        modules_of_torch.register_module_forward_hook(end, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
            # Handles forget this one, and torch.compile would warn of global hooks for ever.
            modules_of_torch._global_forward_hooks_with_kwargs.pop(handle.id, None)
