"""Models that are pruned first and wrapped second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator, attempt_all, world
from distprune._common.pruned_form import local_tensor, mask_key
from distprune.masks.attach import Transaction, unregister
from distprune.masks.checks import (
    check_binary,
    check_hook,
    check_idle,
    check_owners,
    check_state,
    check_ties,
)
from distprune.masks.hook import PruningHook, find_hook, named_hooks
from distprune.shards.checksum import checksums
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard

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
        reader, sharded = ShardReader(), {}
        for path, name, hook in list(named_hooks(model)):
            module, label = model.get_submodule(path), _join(path, name)
            check_state(module, name)
            if not reader.has_whole_mask(module, name):
                continue
            shard = _read(reader, module, name, label)
            if shard.is_sharded:
                assert shard.mask is not None
                check_binary(shard.mask, label)
                check_hook(hook, label)
                sharded[label] = _checksum(module._buffers[mask_key(name)])
                _attach(transaction, reader, module, name, hook, shard, shard.mask)
        return sharded

    with torch.inference_mode(False), torch.no_grad():
        try:
            sharded = communicator.run(shard_all, _describe)
        except BaseException:
            transaction.rollback()
            raise
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
    kept = communicator.run(
        lambda: _masks_of(model),
        lambda kept: _describe({each.label: _checksum(each.mask) for each in kept}),
    )
    taken = Transaction()
    try:
        communicator.run(lambda: _take_off(kept, taken))
    except BaseException:
        taken.rollback()
        raise
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error_of_body:
        raised = error_of_body
    _put_back_everywhere(kept, communicator, raised)


def _put_back_everywhere(
    kept: Sequence[_Kept], communicator: Communicator, raised: BaseException | None
) -> None:
    """Put all masks back on every rank, or on none; raises what the body of the context raised.

    See [Note: all or none] in collectives; but a process that is about to end (KeyboardInterrupt)
    talks to nobody.
    """
    transaction = Transaction()
    with torch.inference_mode(False), torch.no_grad():
        _, failure = attempt_all(_put_back, kept, transaction)
    ending = None if isinstance(raised, Exception) else raised
    failed = torch.tensor([int(failure is not None)])
    if bool(failed if ending is not None else communicator.max(failed)):
        transaction.rollback()
        failed.fill_(1)
    try:
        if ending is not None:
            raise ending
        communicator.agree(error=raised or failure)
    except BaseException as error:
        if bool(failed):
            error.masks = {each.label: each.mask for each in kept}  # type: ignore[attr-defined]
        raise


def _describe(masks: Mapping[str, int]) -> list[tuple[str, str]]:
    """What must be equal on all ranks: the names of the pruned parameters, and their masks."""
    facts = [("pruned parameters with a whole mask", ", ".join(masks))]
    return facts + [(f"mask of {label}, checksum", str(of)) for label, of in masks.items()]


def _checksum(mask: Tensor | None) -> int:
    assert mask is not None
    return checksums([local_tensor(mask) != 0])[0]


@dataclass(frozen=True)
class _Kept:
    """A mask that is put aside, and where it belongs."""

    label: str
    module: nn.Module
    name: str
    hook: PruningHook
    mask: Tensor


def _masks_of(model: nn.Module) -> list[_Kept]:
    """Every mask of a plain model; raises if one of them might not come back as it was."""
    reader, kept = ShardReader(), []
    for path, name, hook in named_hooks(model):
        module, label = model.get_submodule(path), _join(path, name)
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
        kept.append(_Kept(label, module, name, hook, mask))
    check_ties(model)
    return kept


def _take_off(kept: Sequence[_Kept], transaction: Transaction) -> None:
    for each in kept:
        if find_hook(each.module, each.name) is not None:  # else it went with one it is tied to
            transaction.detach(each.module, each.name, None, None)
            unregister(each.module, each.name)


def _put_back(kept: Sequence[_Kept], transaction: Transaction) -> None:
    """Attach all masks, or raise; the caller rolls back then."""
    reader = ShardReader()
    parts = []
    for each in kept:
        shard = _read(reader, each.module, each.name, each.label)
        parts.append((each, shard, shard.slice_of(each.mask.to(shard.values.device))))
    for each, shard, part in parts:
        if find_hook(each.module, each.name) is None:
            _attach(transaction, reader, each.module, each.name, each.hook, shard, part)


def _read(reader: ShardReader, module: nn.Module, name: str, label: str) -> LocalShard:
    managed = reader.managed(module, name)
    if managed is not None:
        check_idle(module, label)
        check_owners(managed.owners, name)
    return reader.read(module, name, label)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _attach(
    transaction: Transaction,
    reader: ShardReader,
    module: nn.Module,
    name: str,
    hook: PruningHook,
    shard: LocalShard,
    part: Tensor,
) -> None:
    """Put this rank's part of a whole mask on a module, with the hook that it had."""
    managed = reader.managed(module, name)
    if shard.is_sharded:  # else the mask goes on as it is
        part = shard.new_mask(torch.bool if managed is not None else part.dtype).copy_(part)
    transaction.attach(module, name, hook, shard.as_parameter_layout(part), managed)
