"""Models that are pruned first and wrapped second."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from distprune.base.memory import ordinary_tensors
from distprune.base.naming import full_name
from distprune.base.pruned_form import local_tensor, mask_key
from distprune.call.reading import read_at_rest
from distprune.masks.attach import Prepared, commit, detach, mask_dtype, prepare, tied_places
from distprune.masks.checks import check_binary, check_hook, check_state, check_ties
from distprune.masks.hook import PruningHook, find_hook, named_hooks, unregister
from distprune.ranks.collectives import Communicator, world
from distprune.shards.checksum import checksums
from distprune.shards.reader import ShardReader
from distprune.shards.shard import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@contextmanager
def masks_aside(model: nn.Module, *, group: ProcessGroup | None = None) -> Iterator[None]:
    """Take the masks off a model while it is wrapped, and put them back, sharded, afterwards.

    Inside the context the modules are ordinary ones: parameters stand under their own names
    with their unmasked values, and any wrapper takes them::

        with distprune.masks_aside(model):
            parallelize_module(model, mesh, plan)       # or fully_shard, accelerator.prepare, ...

    The masks are put back if the body raises, too.

    Args:
        model: pruned, not sharded yet, with the same masks on every rank. Wrappers have to
            keep its modules, as all of torch's do.
        group: the ranks that call this; every rank by default. Collective on entry and on exit.

    Raises:
        NotImplementedError: on entry, a parameter that is sharded already; on exit, a wrapper
            or layout that is not supported.
        ValueError: on entry, a mask with other values than 0 and 1; a tied parameter that is
            pruned differently under its names, or under one only.
        RuntimeError: on entry, a mask was deleted.

    On an error every rank raises, and nothing has changed on entry. On exit no mask is on the
    model then, on any rank; the error has them all in its attribute ``masks``, whole, by full
    name, so that none is lost: pass them to ``custom_from_mask`` on a model that is wrapped in
    another way. If the body raised, its error is the one that is raised, on every rank.

    Cost: no copy of a weight or a mask; a few all-reduces of 40 bytes.
    """
    communicator = world(group)
    detached = communicator.run(lambda: _masks_of(model), _describe)
    for entry in detached:
        if find_hook(entry.module, entry.name) is not None:  # else it was tied to an earlier one
            detach(entry.module, entry.name, None, tied_places(entry.module, entry.hook))
            unregister(entry.module, entry.name)
    error: BaseException | None = None
    try:
        with communicator.raising_everywhere():
            yield
        communicator.agree()  # an error of the body on another rank is raised here
    except BaseException as raised:
        error = raised
    # A process that is about to end (KeyboardInterrupt) talks to nobody.
    is_ending = error is not None and not isinstance(error, Exception)
    ranks = Communicator(()) if is_ending else communicator
    try:
        commit(ranks.run(lambda: _prepare(detached)))
    except BaseException as failure:
        error = failure if error is None else error
        error.masks = {e.label: e.mask for e in detached}  # type: ignore[attr-defined]
    if error is not None:
        raise error


class _PlacedMask(NamedTuple):
    label: str
    module: nn.Module
    name: str
    hook: PruningHook
    mask: Tensor


def _describe(detached: Sequence[_PlacedMask]) -> list[tuple[str, str]]:
    """What must be equal on all ranks: the names of the pruned parameters, and their masks."""
    names = ", ".join(entry.label for entry in detached)
    sums = checksums([local_tensor(entry.mask) != 0 for entry in detached])
    return [("pruned parameters with a whole mask", names)] + [
        (f"mask of {entry.label}, checksum", str(checksum))
        for entry, checksum in zip(detached, sums, strict=True)
    ]


def _masks_of(model: nn.Module) -> list[_PlacedMask]:
    """Every mask of a plain model. Raises if one of them could not be restored exactly."""
    reader, detached = ShardReader(), []
    for path, name, hook in named_hooks(model):
        module, label = model.get_submodule(path), full_name(path, name)
        check_state(module, name)
        if reader.read(module, name, label).is_sharded:
            raise NotImplementedError(
                f"{label} is sharded already; expected a model that was pruned and has not been "
                "wrapped yet. Masks that were made after wrapping need not be put aside."
            )
        mask = module._buffers[mask_key(name)]
        assert mask is not None
        check_binary(mask, label)
        check_hook(hook, label)
        detached.append(_PlacedMask(label, module, name, hook, mask))
    check_ties(model)
    return detached


@torch.no_grad()
def _prepare(detached: Sequence[_PlacedMask]) -> list[Prepared]:
    """Cut each mask like its parameter is cut now; tied parameters once, at all their places."""
    reader = ShardReader()
    tied: dict[Hashable, tuple[Shard, list[_PlacedMask]]] = {}
    prepared = []
    with ordinary_tensors():
        for entry in detached:
            shard = read_at_rest(reader, entry.module, entry.name, entry.label)
            tied.setdefault(shard.key, (shard, []))[1].append(entry)
        for shard, entries in tied.values():
            part = shard.slice_of(entries[0].mask.to(shard.values.device))
            if shard.is_sharded:  # else the mask goes on as it is
                part = shard.new_mask(mask_dtype(shard)).copy_(part)
            shard.places = tuple((entry.module, entry.name) for entry in entries)
            hooks = [entry.hook for entry in entries]
            prepared.append(prepare(shard, hooks, shard.as_parameter_layout(part)))
    return prepared
