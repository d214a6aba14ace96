"""The files of a folder: which there are, where links lead, and whether they can be read.

[Note: links] A checkpoint that was downloaded is data of somebody else. A link in it that leaves
the folder would put whatever it leads to into the copy, /etc/shadow as well as a key. Links are
followed inside the folder, and from a snapshot of a Hugging Face cache into the cache of the same
model, where its files lie. Any other link is refused by name, unless the caller trusts all links.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

# Of copies: permissions, without set-user-ID and the like.
_PERMISSIONS = 0o777
_SHOWN = 8  # links in a message


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file beside the weights that belongs to the checkpoint.

    Attributes:
        name: relative to the folder.
        path: where to read it, links resolved.
        size, mtime_ns: as they were when the folder was read.
        mode: its permissions; a copy gets them, less the umask.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    mode: int


@dataclass
class Listing:
    """What :func:`list_files` found.

    Attributes:
        files: regular files, by name relative to the folder.
        folders: the permissions of the folder ("") and of those in it, by name.
        skipped: (name, reason) of what was not looked at.
        outside: (name, goal) of links that lead out of the folder, which are not followed.
        problems: sentences on all else that is wrong.
    """

    files: dict[str, OtherFile] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    outside: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def top(self) -> list[str]:
        """Names of the files that lie in the folder itself, sorted."""
        return sorted(name for name in self.files if os.sep not in name)


def list_files(
    folder: str,
    why_left_out: Callable[[str], str | None],
    *,
    wanted: tuple[str, ...],
    follow_links: bool = False,
) -> Listing:
    """Find all regular files of a folder and of those in it.

    Args:
        folder: an existing one.
        why_left_out: of a folder in it, by name, why it is not looked at; None: it is.
        wanted: ends of names. If no file of the folder itself has one, it is no checkpoint, and
            of all that it may hold, no more than its own folders is looked at.
        follow_links: take links wherever they lead.

    Returns:
        The files, the links that leave the folder, and as problems: links that lead nowhere or
        around in a circle, and what cannot be listed.

    Cost: some microseconds per file; nothing is opened.
    """
    listing = Listing()
    roots = None if follow_links else _roots(folder)
    try:
        is_checkpoint = any(name.endswith(wanted) for name in os.listdir(folder))
    except OSError:
        is_checkpoint = False  # said below
    _list(listing, folder, why_left_out, roots, None if is_checkpoint else 1)
    return listing


def list_one(folder: str, name: str, *, follow_links: bool = False) -> Listing:
    """The listing of a folder of which one file only is of interest."""
    listing = Listing(folders={"": os.stat(folder).st_mode & _PERMISSIONS})
    path = os.path.join(folder, name)
    info, real = os.stat(path), os.path.realpath(path)
    if os.path.islink(path) and _leaves(real, None if follow_links else _roots(folder)):
        listing.outside.append((name, real))
    else:
        listing.files[name] = _file(name, real, info)
    return listing


def outside_problem(links: Sequence[tuple[str, str]]) -> str:
    """A sentence on links that lead out of a folder: (name, goal), one at least."""
    shown = ", ".join(f"{name} (to {ascii_name(goal)})" for name, goal in links[:_SHOWN])
    more = f" and {len(links) - _SHOWN} more" if len(links) > _SHOWN else ""
    lead = "a link leads" if len(links) == 1 else f"{len(links)} links lead"
    return (
        f"{lead} out of the folder and its Hugging Face cache: {shown}{more}. A copy would hold "
        "what is there. If you trust the folder, allow it with --follow-links (follow_links=True)."
    )


def ascii_name(path: str) -> str:
    """A path for a message: as it is if it can be printed, else with escapes."""
    return path if path.isprintable() else ascii(path)


def unreadable(files: Collection[OtherFile]) -> Iterator[str]:
    """Sentences on the files that this process may not read.

    Each is opened: neither permission bits nor ``os.access`` know of a network file system's
    rules, or of those of the system for containers.
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
    roots: tuple[str, ...] | None,
    depth: int | None,
) -> None:
    # With the real paths of the folders above: a link to one of them is a circle.
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
                    if _leaves(real, roots):
                        listing.outside.append((name, real))
                        continue
            except OSError as error:
                listing.problems.append(_unknown(name, entry, error))
                continue
            if stat.S_ISDIR(info.st_mode):
                if reason := why_left_out(name):
                    listing.skipped.append((name, reason))
                elif real in above:
                    listing.problems.append(
                        f"{name} is a link to a folder that it lies in ({real}): a copy would "
                        "have no end. Remove it."
                    )
                elif depth is None or len(above) <= depth:
                    pending.append((name, above))
            elif stat.S_ISREG(info.st_mode):
                listing.files[name] = _file(name, real, info)
            else:
                listing.skipped.append((name, "no regular file"))


def _file(name: str, path: str, info: os.stat_result) -> OtherFile:
    mode = info.st_mode & _PERMISSIONS
    return OtherFile(name, path, info.st_size, info.st_mtime_ns, mode)


def _roots(folder: str) -> tuple[str, ...]:
    """Where links may lead: the folder, and the cache of its model if it is a snapshot."""
    real = os.path.realpath(folder)
    parts = real.split(os.sep)
    roots = [real]
    for i in range(len(parts) - 2, 0, -1):
        if parts[i + 1] == "snapshots" and parts[i].startswith("models--"):
            roots.append(os.sep.join([*parts[: i + 1], "blobs"]))
            break
    return tuple(roots)


def _leaves(real: str, roots: tuple[str, ...] | None) -> bool:
    if roots is None:
        return False
    return not any(real == root or real.startswith(root.rstrip(os.sep) + os.sep) for root in roots)


def _unknown(name: str, entry: os.DirEntry[str], error: OSError) -> str:
    try:
        goal = os.readlink(entry.path) if entry.is_symlink() else None
    except OSError:
        goal = None
    if goal is not None and isinstance(error, FileNotFoundError):
        return f"{name} is a link to {goal}, which does not exist; download it again."
    link = f" (a link to {goal})" if goal is not None else ""
    return f"{name}{link} cannot be read: {error.strerror}."
