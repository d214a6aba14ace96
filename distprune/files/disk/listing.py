"""The files of a folder, and whether they can be read.

A symbolic link is read like the file or the folder that it points to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

_PERMISSIONS = 0o777  # without set-user-ID and the like


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file of the checkpoint that is not a safetensors file with weights.

    Attributes:
        name: relative to the folder.
        path: where to read it, links resolved.
        size, mtime_ns: when the folder was listed.
        mode: permissions; a copy gets them, less the umask.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    mode: int


@dataclass
class Listing:
    """The content of a folder.

    Attributes:
        files: regular files, by name relative to the folder.
        folders: permissions of the folder ("") and of its subfolders, by name.
        skipped: (name, reason) of entries that are not listed.
        problems: sentences on everything else that is wrong.
    """

    files: dict[str, OtherFile] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def top(self) -> list[str]:
        """Sorted names of the files in the folder itself."""
        return sorted(name for name in self.files if os.sep not in name)


def list_files(
    folder: str,
    why_left_out: Callable[[str], str | None],
    *,
    suffixes: tuple[str, ...],
) -> Listing:
    """List all regular files of a folder and its subfolders.

    Args:
        folder: an existing one.
        why_left_out: returns the reason for which a subfolder is skipped, by name; None to list it.
        suffixes: how names of files of a checkpoint end. If no file in the folder itself has one of
            them, the folder is not a checkpoint, and only one level of subfolders is listed.

    Returns:
        The files, and as problems: broken and circular links, and folders that cannot be listed.

    Cost: some microseconds per file; no file is opened.
    """
    listing = Listing()
    try:
        is_checkpoint = any(name.endswith(suffixes) for name in os.listdir(folder))
    except OSError:
        is_checkpoint = False  # _list reports it
    _list(listing, folder, why_left_out, None if is_checkpoint else 1)
    return listing


def list_one(folder: str, name: str) -> Listing:
    """A listing that has one file of a folder only."""
    path = os.path.join(folder, name)
    file = _file(name, os.path.realpath(path), os.stat(path))
    return Listing({name: file}, {"": os.stat(folder).st_mode & _PERMISSIONS})


def unreadable(files: Collection[OtherFile]) -> Iterator[str]:
    """Sentences on the files that this process may not read.

    Opens each file: neither permission bits nor ``os.access`` know the rules of network file
    systems and containers.
    """
    for file in files:
        try:
            os.close(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            yield f"{file.name} cannot be read: {error.strerror}."


def _list(
    listing: Listing,
    folder: str,
    why_left_out: Callable[[str], str | None],
    depth: int | None,
) -> None:
    # With the real paths of the parent folders: a link to one of them is circular.
    pending: list[tuple[str, tuple[str, ...]]] = [("", ())]
    while pending:
        inner, above = pending.pop()
        path = os.path.join(folder, inner)
        try:
            above = (*above, os.path.realpath(path))
            mode = os.stat(path).st_mode
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            listing.problems.append(f"{inner or folder} cannot be listed: {error.strerror}.")
            continue
        listing.folders[inner] = mode & _PERMISSIONS
        for entry in entries:
            name = os.path.join(inner, entry.name)
            try:
                info, real = entry.stat(), os.path.join(above[-1], entry.name)
                if entry.is_symlink():
                    real = os.path.realpath(entry.path)
            except OSError as error:
                listing.problems.append(_unreadable_entry(name, entry, error))
                continue
            if stat.S_ISDIR(info.st_mode):
                if reason := why_left_out(name):
                    listing.skipped.append((name, reason))
                elif real in above:
                    listing.problems.append(
                        f"{name} is a link to a folder that contains it ({real}), so that a copy "
                        "would never end. Remove it."
                    )
                elif depth is None or len(above) <= depth:
                    pending.append((name, above))
            elif stat.S_ISREG(info.st_mode):
                listing.files[name] = _file(name, real, info)
            else:
                listing.skipped.append((name, "no regular file"))  # as stored in reports


def _file(name: str, path: str, info: os.stat_result) -> OtherFile:
    mode = info.st_mode & _PERMISSIONS
    return OtherFile(name, path, info.st_size, info.st_mtime_ns, mode)


def _unreadable_entry(name: str, entry: os.DirEntry[str], error: OSError) -> str:
    try:
        target = os.readlink(entry.path) if entry.is_symlink() else None
    except OSError:
        target = None
    if target is not None and isinstance(error, FileNotFoundError):
        return f"{name} is a link to {target}, which does not exist; download it again."
    link = f" (a link to {target})" if target is not None else ""
    return f"{name}{link} cannot be read: {error.strerror}."
