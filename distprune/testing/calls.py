"""Calls that travel to another process by pickle, with the files that their functions are in."""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class RankError(AssertionError):
    """A rank raised, died or did not answer; the text holds its traceback."""


@dataclass(frozen=True)
class ModuleFile:
    """Where a module came from: pytest loads test files by path, under names of its choice."""

    name: str
    file: str | None
    folders: list[str] | None  # of a package


@dataclass(frozen=True)
class PackedCall:
    """A function and its arguments for another process.

    Attributes:
        call: pickled (fn, args, kwargs).
        modules: of every function and class in it, parents first.
        paths: the caller's ``sys.path``.
    """

    call: bytes
    modules: list[ModuleFile]
    paths: list[str]

    def unpack(self) -> tuple[Callable, tuple, dict[str, Any]]:
        """In the other process: import what is needed and return (fn, args, kwargs)."""
        sys.path[:] = self.paths
        importlib.invalidate_caches()  # files may be younger than this process
        for module in self.modules:
            _make_importable(module)
        return pickle.loads(self.call)


def pack(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> PackedCall:
    """Pickle a call.

    Raises:
        TypeError: fn or an argument cannot be found by name in another process: it is a lambda,
            is defined inside a function or in ``__main__``, or is no picklable value.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r} is not callable; expected a function of a module.")
    buffer = io.BytesIO()
    pickler = _NotingModules(buffer)
    try:
        pickler.dump((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{_name(fn)} and its arguments must travel to the ranks by pickle: {error}. Expected "
            "a function at the top level of a module or test file (no lambda, no function inside "
            "a function), and arguments that can be pickled."
        ) from error
    if "__main__" in pickler.modules:
        raise TypeError(
            f"{_name(fn)} or one of its arguments is defined in __main__, which other processes "
            "cannot import; expected a function of a module. Move it to a file that pytest "
            "collects, or to one that the script imports."
        )
    return PackedCall(buffer.getvalue(), _with_parents(pickler.modules), list(sys.path))


class _NotingModules(pickle.Pickler):
    """Notes the module of every function and class that it pickles by name."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.FunctionType, type)):
            self.modules[obj.__module__] = None
        return NotImplemented


def _with_parents(names: dict[str, None]) -> list[ModuleFile]:
    """The modules and the packages around them, outermost first, as they are loaded here."""
    found: dict[str, ModuleFile] = {}
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            part = ".".join(parts[:length])
            module = sys.modules.get(part)
            folders = getattr(module, "__path__", None)
            file = getattr(module, "__file__", None)
            folders = None if folders is None else [str(folder) for folder in folders]
            if file or folders:  # not built in
                found.setdefault(part, ModuleFile(part, file, folders))
    return list(found.values())


def _make_importable(wanted: ModuleFile) -> None:
    """See to it that the name stands for the same file as in the process that called."""
    if _is_same(sys.modules.get(wanted.name), wanted):
        return
    sys.modules.pop(wanted.name, None)  # of an earlier call, from another file
    if _would_find(wanted):
        importlib.import_module(wanted.name)
    elif wanted.file is None:  # a folder without __init__.py
        module = types.ModuleType(wanted.name)
        module.__path__ = wanted.folders
        sys.modules[wanted.name] = module
    else:
        spec = importlib.util.spec_from_file_location(
            wanted.name, wanted.file, submodule_search_locations=wanted.folders
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[wanted.name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[wanted.name]
            raise


def _is_same(module: types.ModuleType | None, wanted: ModuleFile) -> bool:
    return module is not None and getattr(module, "__file__", None) == wanted.file


def _would_find(wanted: ModuleFile) -> bool:
    """Whether an ordinary import finds that very file."""
    try:
        spec = importlib.util.find_spec(wanted.name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.has_location and spec.origin == wanted.file


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
