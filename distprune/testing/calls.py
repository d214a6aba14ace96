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
    """The file of a module; pytest loads test files by path, under names that it chooses."""

    name: str
    file: str | None
    folders: list[str] | None  # of a package


@dataclass(frozen=True)
class PackedCall:
    """A function and its arguments for another process.

    Attributes:
        call: pickled (fn, args, kwargs).
        modules: the modules of every function and class in it, parents first.
        paths: the caller's ``sys.path``.
    """

    call: bytes
    modules: list[ModuleFile]
    paths: list[str]

    def unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """In the other process: import the modules and return (fn, args, kwargs)."""
        sys.path[:] = self.paths
        importlib.invalidate_caches()  # files may be younger than this process
        for module in self.modules:
            _make_importable(module)
        fn, args, kwargs = pickle.loads(self.call)
        return fn, args, kwargs


def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
    """Pickle a call.

    Raises:
        TypeError: fn or an argument cannot be found by name in another process: it is a lambda,
            is defined inside a function or in ``__main__``, or is no picklable value.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r} is not callable; expected a function of a module.")
    buffer = io.BytesIO()
    pickler = _ModuleRecorder(buffer)
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


class _ModuleRecorder(pickle.Pickler):
    """Records the module of every function and class that it pickles by name."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.FunctionType, type)):
            self.modules[obj.__module__] = None
        return NotImplemented


def _with_parents(names: dict[str, None]) -> list[ModuleFile]:
    """The modules and their parent packages, outermost first, as loaded in this process."""
    files: dict[str, ModuleFile] = {}
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            part = ".".join(parts[:length])
            module = sys.modules.get(part)
            folders = getattr(module, "__path__", None)
            file = getattr(module, "__file__", None)
            folders = None if folders is None else [str(folder) for folder in folders]
            if file or folders:  # not built in
                files.setdefault(part, ModuleFile(part, file, folders))
    return list(files.values())


def _make_importable(module_file: ModuleFile) -> None:
    """Make the module's name stand for the same file as in the calling process."""
    name, file = module_file.name, module_file.file
    if _is_from(sys.modules.get(name), module_file):
        return
    sys.modules.pop(name, None)  # of an earlier call, from another file
    if _would_find(module_file):
        importlib.import_module(name)
    elif file is None:  # a folder without __init__.py
        module = types.ModuleType(name)
        module.__path__ = module_file.folders or []
        sys.modules[name] = module
    else:
        spec = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=module_file.folders
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"module {name}: Python has no loader for {file}.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise


def _is_from(module: types.ModuleType | None, module_file: ModuleFile) -> bool:
    return module is not None and getattr(module, "__file__", None) == module_file.file


def _would_find(module_file: ModuleFile) -> bool:
    """Whether an ordinary import finds exactly that file."""
    try:
        spec = importlib.util.find_spec(module_file.name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.has_location and spec.origin == module_file.file


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
