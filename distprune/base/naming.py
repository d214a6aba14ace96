"""Names of parameters that do not depend on how the model is wrapped."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from torch import nn

# A module and the name of one of its parameters.
Pair = tuple[nn.Module, str]


class NamedParameter(tuple[nn.Module, str]):
    """A (module, name) pair, as torch.nn.utils.prune takes them, with its full name.

    Attributes:
        fqn: fully qualified name without wrapper prefixes, for reports and messages.
        places: every (module, name) of the parameter: more than one if it is tied.
    """

    fqn: str
    places: tuple[tuple[nn.Module, str], ...]

    def __new__(cls, module: nn.Module, name: str, fqn: str) -> NamedParameter:
        pair = super().__new__(cls, (module, name))
        pair.fqn = fqn
        pair.places = ((module, name),)
        return pair

    def __getnewargs__(self) -> tuple[nn.Module, str, str]:
        """For copies and pickles."""
        return (*self, self.fqn)

    def with_places(self, places: Iterable[tuple[nn.Module, str]]) -> NamedParameter:
        """The same pair, for a parameter that is tied."""
        pair = NamedParameter(*self, self.fqn)
        pair.places = tuple((module, name) for module, name in places)
        return pair


def is_pair(value: object) -> TypeGuard[Pair]:
    """Whether a value is a (module, name) pair."""
    match value:
        case (nn.Module(), str()):
            return True
    return False


def checked_pair(
    value: object, what: str, expected: str = "a (module, name) pair, as select(model) lists them"
) -> Pair:
    """The module of a (module, name) pair, without wrappers, and the name.

    Raises:
        TypeError: the value is no such pair; ``what`` names it, ``expected`` says what it may be.
    """
    match value:
        case (nn.Module() as module, str() as name):
            return unwrap(module), name
        case (one, other):
            found = f"a pair of {type(one).__name__} and {type(other).__name__}"
        case _:
            found = repr(value) if isinstance(value, (str, int)) else f"a {type(value).__name__}"
    raise TypeError(f"{what} is {found}; expected {expected}.")


def plain_key(key: Any) -> Any:
    """A key of a mapping by parameter: a (module, name) pair without wrappers, or as it is."""
    return (unwrap(key[0]), key[1]) if is_pair(key) else key


def label_of(pair: Pair, position: int | None = None) -> str:
    """What messages call a parameter: its full name, or ``Linear.weight (#3)`` without one."""
    fqn: str | None = getattr(pair, "fqn", None)
    place = "" if position is None else f" (#{position})"
    return fqn or f"{type(unwrap(pair[0])).__name__}.{pair[1]}{place}"


def tied_places(pair: Pair) -> list[Pair]:
    """Every (module, name) of a tied parameter, unwrapped; of another pair, only itself."""
    return [(unwrap(module), name) for module, name in getattr(pair, "places", (pair,))]


def full_name(path: str, name: str) -> str:
    """The name of a child: ``path.name``, or ``name`` alone at the root."""
    return f"{path}.{name}" if path else name


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside all wrappers. A wrapper is recognised by its type, not by an attribute."""
    while (attribute := _inside(type(module))) is not None:  # type: ignore[arg-type]
        module = getattr(module, attribute)
    return module


@functools.lru_cache(maxsize=1 << 10)
def _inside(wrapper: type) -> str | None:
    """The attribute in which a wrapper has the module that it wraps; None for another module."""
    for type_module, type_name, attribute in _WRAPPERS:
        # A wrapper whose module is not imported wraps nothing.
        loaded = sys.modules.get(type_module)
        if loaded is not None and issubclass(wrapper, getattr(loaded, type_name)):
            return attribute
    return None


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module below a model once, unwrapped, with its name free of wrapper prefixes.

    In the order of registration, parents first: the same on every rank and wrapper.
    """
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        module = unwrap(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(child, full_name(name, child_name))

    yield from walk(root, "")


def registered_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(full name, module, registered name, parameter) of what the modules of a model register.

    A tied parameter comes once for each of its names. What a wrapper has taken away, or gathered,
    comes as the wrapper registers it; ``shards.reader`` knows better.
    """
    for path, module in named_modules(root):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield full_name(path, name), module, name, parameter


_WRAPPERS = (
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
)


class UnfitScores(ValueError):
    """Scores that have no ranking, for callers who say it in other words.

    Attributes:
        what: is wrong, in a word.
        names: of the parameters.
    """

    def __init__(self, text: str, what: str = "", names: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.what, self.names = what, tuple(names)
