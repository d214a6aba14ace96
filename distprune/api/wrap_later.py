"""Models that are pruned first and wrapped second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from distprune.base.naming import full_name
from distprune.base.pruned_form import local_tensor, mask_key
from distprune.call.reading import read_at_rest
from distprune.masks.attach import Transaction, mask_dtype
from distprune.masks.checks import (
    check_binary,
    check_hook,
    check_state,
    check_ties,
)
from distprune.masks.hook import PruningHook, find_hook, named_hooks, unregister
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.shards.checksum import checksums
from distprune.shards.reader import ShardReader
from distprune.shards.shard import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shard_masks(model: nn.Module, *, group: ProcessGroup | None = None) -> int:
    """Shard the masks of a model that was pruned first and wrapped second.

    A model that was pruned on one process, the same way on every rank, and then wrapped in
    FSDP1, FSDP2, HSDP or column-wise tensor parallelism has sharded weights, but whole masks on
    every rank; under FSDP it also computes, and keeps, whole masked weights. After this call
    masks lie as their parameters do, as if the wrapped model had been pruned. (Pruning again
    does the same.) DDP needs no such call. Before row-wise tensor parallelism, which torch
    refuses for a pruned module, and before anything else that does not take a pruned module,
    use :func:`masks_aside`.

    Args:
        model: wrapped; the same on every rank.
        group: the ranks that call this; every rank by default. Collective.

    Returns:
        How many parameters had a whole mask.

    Raises:
        NotImplementedError: a wrapper or layout that is not supported.
        ValueError: a mask with other values than 0 and 1; a tied parameter that is pruned
            differently under its names, or under one only: FSDP masks it under all of them.
        RuntimeError: a mask was deleted; a forward or a backward is running. By name, on every
            rank; nothing has changed then.

    Cost: local, but for two all-reduces of 40 bytes. Masks are cut one by one.
    """
    communicator = world(group)
    transaction = Transaction()

    def shard_all() -> dict[str, int]:
        """The checksum of each whole mask: every rank cuts its own."""
        reader, sharded, to_attach = ShardReader(), {}, []
        for path, name, hook in list(named_hooks(model)):
            module, label = model.get_submodule(path), full_name(path, name)
            check_state(module, name)
            if not reader.has_whole_mask(module, name):
                continue
            shard = read_at_rest(reader, module, name, label)
            if shard.is_sharded:
                assert shard.mask is not None
                check_binary(shard.mask, label)
                check_hook(hook, label)
                sharded[label] = _checksum(module._buffers[mask_key(name)])
                to_attach.append((_PlacedMask(label, module, name, hook, shard.mask), shard))
                if name in module.__dict__:  # a product that no forward has used
                    module.__dict__[name] = module.__dict__[name].detach()
            elif shard.forgets_pruned:
                transaction.hold(module, name)
        for entry, shard in to_attach:
            _attach(transaction, entry, shard, entry.mask)
        return sharded

    with torch.inference_mode(False), torch.no_grad():
        try:
            sharded = communicator.run(shard_all, _describe)
        except BaseException:
            transaction.rollback()
            raise
        transaction.commit()
    return len(sharded)


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
    detached = communicator.run(
        lambda: _masks_of(model),
        lambda detached: _describe({entry.label: _checksum(entry.mask) for entry in detached}),
    )
    taken = Transaction()
    try:
        communicator.run(lambda: _take_off(detached, taken))
    except BaseException:
        taken.rollback()
        raise
    raised: BaseException | None = None
    try:
        with communicator.raising_everywhere():
            yield
    except BaseException as error_of_body:
        raised = error_of_body
    _put_back_everywhere(detached, communicator, raised)


def _put_back_everywhere(
    detached: Sequence[_PlacedMask], communicator: Communicator, raised: BaseException | None
) -> None:
    """Put all masks back on every rank, or on none; raises what the body of the context raised.

    See [Note: all or none] in collectives; but a process that is about to end (KeyboardInterrupt)
    talks to nobody.
    """
    transaction = Transaction()
    failure: BaseException | None = None
    try:
        with torch.inference_mode(False), torch.no_grad():
            _put_back(detached, transaction)
    except BaseException as caught:
        failure = caught
    error = raised
    is_ending = raised is not None and not isinstance(raised, Exception)
    if error is None:
        try:
            communicator.agree(error=failure)
            transaction.commit()
            return
        except BaseException as of_any_rank:  # also that of a body
            error = of_any_rank
    failed = torch.tensor([int(failure is not None)])
    if bool(failed if is_ending else communicator.max(failed)):
        transaction.rollback()
        error.masks = {entry.label: entry.mask for entry in detached}  # type: ignore[attr-defined]
    raise error


def _describe(masks: Mapping[str, int]) -> list[tuple[str, str]]:
    """What must be equal on all ranks: the names of the pruned parameters, and their masks."""
    facts = [("pruned parameters with a whole mask", ", ".join(masks))]
    return facts + [(f"mask of {label}, checksum", str(of)) for label, of in masks.items()]


def _checksum(mask: Tensor | None) -> int:
    assert mask is not None
    return checksums([local_tensor(mask) != 0])[0]


@dataclass(frozen=True)
class _PlacedMask:
    """A mask, and where it belongs."""

    label: str
    module: nn.Module
    name: str
    hook: PruningHook
    mask: Tensor


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


def _take_off(detached: Sequence[_PlacedMask], transaction: Transaction) -> None:
    for entry in detached:
        if find_hook(entry.module, entry.name) is not None:  # else it was detached with a tied one
            transaction.detach(entry.module, entry.name, None, None)
            unregister(entry.module, entry.name)


def _put_back(detached: Sequence[_PlacedMask], transaction: Transaction) -> None:
    """Attach all masks, or raise; the caller rolls back then."""
    reader = ShardReader()
    parts = []
    for entry in detached:
        shard = read_at_rest(reader, entry.module, entry.name, entry.label)
        parts.append((entry, shard, shard.slice_of(entry.mask.to(shard.values.device))))
    for entry, shard, part in parts:
        if find_hook(entry.module, entry.name) is None:
            _attach(transaction, entry, shard, part)


def _attach(transaction: Transaction, entry: _PlacedMask, shard: Shard, part: Tensor) -> None:
    """Put this rank's part of a whole mask on a module, with the hook that it had."""
    if shard.is_sharded:  # else the mask goes on as it is
        part = shard.new_mask(mask_dtype(shard)).copy_(part)
    mask = shard.as_parameter_layout(part)
    transaction.attach(entry.module, entry.name, entry.hook, mask, shard.managed)
