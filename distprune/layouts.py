"""Tell distprune where the parameters of another wrapper live: one class and one call.

Wrappers that distprune does not know, but that store a run of each parameter on each rank (flat
buffers, ragged shards), become known by a subclass of :class:`StoredRun`, which describes one
parameter, and a finder, which makes it of a module and a name::

    distprune.layouts.register(lambda module, name: MyRun(...) if ... else None)

From then on every pruning call, ``verify``, ``remove``, masks in files and the statistics of such
parameters give what one process would. Zeros are held there as on every sharded parameter: see
``wrappers.held``. docs/layouts.md has a whole example.
"""

from distprune.wrappers.managed import StoredRun
from distprune.wrappers.wrapper import Finder, finders

__all__ = ["Finder", "StoredRun", "register", "unregister"]


def register(finder: Finder) -> None:
    """Ask a finder for every parameter from now on. Call it on every rank.

    Args:
        finder: gets a module and a name that it registers; returns the record of that parameter,
            or None if it is none of its kind. It should be quick: it is asked for each parameter of
            each call. The first finder that returns a record is believed.

    Raises:
        TypeError: not callable.
    """
    if not callable(finder):
        raise TypeError(
            f"finder is a {type(finder).__name__}; expected a function of a module and a name."
        )
    if finder not in finders:
        finders.append(finder)


def unregister(finder: Finder) -> None:
    """Undo :func:`register`. Parameters that are pruned then are no longer found."""
    if finder in finders:
        finders.remove(finder)
