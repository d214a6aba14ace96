"""What one rank can find out alone: its pruned parameters, with their problems."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distprune.base import memory
from distprune.base.naming import registered_parameters
from distprune.base.pruned_form import is_dtensor, orig_key
from distprune.masks.fingerprint import fingerprint_parts
from distprune.masks.hook import MaskRecord
from distprune.ranks.collectives import Communicator
from distprune.shards.checksum import at_position, checksums
from distprune.shards.reader import ShardReader
from distprune.shards.shard import Shard
from distprune.verification.places import Place, check
from distprune.wrappers import masked_value
from distprune.wrappers.managed import Managed
from distprune.wrappers.wrapper import managed_parameters

# Elements at a time, so that temporaries stay in the second-level cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 25


@dataclass
class LocalEntry:
    """One parameter on this rank.

    Attributes:
        name: fully qualified.
        problems: what is wrong with the parameter on this rank.
        record: the mask that the last pruning left; None if unknown.
        shard: this rank's part; None if it could not be read, and the numbers are 0 then.
        num_pruned: elements of the part that the mask prunes.
        fingerprint: the part's summand of the fingerprint of the whole mask.
        mask_hash, weight_hash: int64 that depend on the contents and on their position in the
            parameter; equal where replicas are. weight_hash is 0 if nobody has a replica.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    record: MaskRecord | None = None
    shard: Shard | None = None
    num_pruned: int = 0
    fingerprint: int = 0
    mask_hash: int = 0
    weight_hash: int = 0


def inspect(places: Sequence[Place], communicator: Communicator) -> dict[str, LocalEntry]:
    """Check everything that the places of parameters show on this rank: entries by name."""
    reader, managed = ShardReader(), managed_parameters()
    by_key: dict[Hashable, LocalEntry] = {}
    entries: dict[str, LocalEntry] = {}
    products: dict[str, Tensor | None] = {}
    for place in places:
        shard = _read(place, reader, managed)
        key: Hashable = (id(place.module), place.name) if shard is None else shard.key
        entry = by_key.get(key)
        if entry is None:
            entry = by_key[key] = entries.setdefault(place.path, LocalEntry(place.path))
            if shard is not None and shard.mask is None:
                place.problems.append("its mask cannot be found")
            elif shard is not None:
                entry.shard, products[entry.name] = shard, _product(place, shard)
            entry.record = None if place.hook is None else place.hook.record
        elif shard is not None:
            _compare_tied(entry, place, shard)
        prefix = "" if place.path == entry.name else f"as {place.path}, "
        entry.problems += [prefix + text for text in place.problems]
    _measure([entry for entry in entries.values() if entry.shard], products, communicator)
    return entries


def find_dense_places(
    model: nn.Module, places: Sequence[Place], entries: Mapping[str, LocalEntry]
) -> None:
    """Add problems of pruned parameters that are also registered without their mask."""
    entry_of_original: dict[int, LocalEntry] = {}
    checked: set[tuple[int, str]] = set()  # (id of a module, name) pairs that are checked elsewhere
    for place in places:
        checked |= {(id(place.module), orig_key(place.name)), (id(place.module), place.name)}
        if isinstance(place.original, nn.Parameter) and place.path in entries:
            entry_of_original.setdefault(id(place.original), entries[place.path])
    for fqn, module, name, parameter in registered_parameters(model):
        entry = entry_of_original.get(id(parameter))
        if entry is not None and (id(module), name) not in checked:
            entry.problems.append(f"it is registered as {fqn} too, and acts there unmasked")


def _read(
    place: Place, reader: ShardReader, managed: Mapping[tuple[int, str], Managed]
) -> Shard | None:
    """Check a place and read its shard; None, with the problem added, if that fails."""
    try:
        check(place, reader, managed)
        if place.is_readable:
            return reader.read(place.module, place.name, place.path)
    except Exception as error:  # of any type: it is a problem of the parameter
        place.problems.append(_unreadable(error))
    return None


def _unreadable(error: Exception) -> str:
    return f"cannot be read: {type(error).__name__}: {error}"


def _product(place: Place, shard: Shard) -> Tensor | None:
    """The masked weight that the module keeps, shaped like the shard.

    None if there is none: it is computed when it is read, or at the next forward.
    """
    if masked_value.is_live(place.module, place.name):
        return None
    product = place.module.__dict__.get(place.name)
    # After .to() the product keeps the old device and dtype until the next forward.
    is_current = (
        isinstance(product, Tensor)
        and product.shape == shard.values.shape
        and product.dtype == shard.values.dtype
        and product.device == shard.values.device
        and not is_dtensor(product)
    )
    return product if is_current else None


def _compare_tied(entry: LocalEntry, place: Place, shard: Shard) -> None:
    first = None if entry.shard is None else entry.shard.mask
    if first is None or shard.mask is None or first is shard.mask:
        return
    if first.shape != shard.mask.shape or not torch.equal(first != 0, shard.mask != 0):
        place.problems.append("it is tied, and has another mask than under its first name")


def _measure(
    entries: Sequence[LocalEntry],
    products: Mapping[str, Tensor | None],
    communicator: Communicator,
) -> None:
    """Count and hash masks, and what is under them; the entries have shards.

    Cost: two reads of the mask, and one of the weight, or two if it has replicas. Waits for a
    device three times.
    """
    started: list[tuple[LocalEntry, Shard, Tensor, Tensor]] = []
    for entry in entries:
        shard = entry.shard
        assert shard is not None and shard.mask is not None
        try:
            numbers = _numbers(shard, shard.mask, products[entry.name])
        except Exception as error:
            entry.problems.append(_unreadable(error))
            entry.shard = None
        else:
            started.append((entry, shard, shard.mask, numbers))
    replicated = {
        entry.name: shard.values
        for entry, shard, *_ in started
        if _has_replicas(shard, communicator)
    }
    sums = dict(zip(replicated, checksums([*replicated.values()]), strict=True))
    rows = memory.lists_on_host([numbers for *_, numbers in started])
    fingerprints = fingerprint_parts([each[1] for each in started], [each[2] for each in started])
    for (entry, shard, *_), row, fingerprint in zip(started, rows, fingerprints, strict=True):
        num_pruned, num_kept, num_infinite, num_exposed = row
        num_elements = shard.values.numel()
        num_others = num_elements - num_pruned - num_kept
        if num_others:
            entry.problems.append(
                f"its mask is not binary: {num_others} of {num_elements} values are neither 0 nor 1"
            )
        if num_infinite:
            entry.problems.append(
                "infinite or NaN values are under the mask, whose product with 0 is NaN and not 0"
            )
        elif num_exposed:
            entry.problems.append(
                "the masked weight that is there now is not 0 where the mask is: it, or the mask, "
                "was written to after it had been computed"
            )
        entry.num_pruned, entry.fingerprint = num_pruned, fingerprint
        entry.mask_hash = at_position(shard.position, fingerprint, num_pruned, num_kept)
        if entry.name in sums:
            entry.weight_hash = at_position(shard.position, sums[entry.name])


def _has_replicas(shard: Shard, communicator: Communicator) -> bool:
    """Whether other ranks may have the same elements."""
    is_on_part = shard.ranks is None or len(shard.ranks) < communicator.size
    return communicator.size > 1 and (shard.num_replicas > 1 or is_on_part)


def _numbers(shard: Shard, local_mask: Tensor, product: Tensor | None) -> Tensor:
    """How many elements are pruned, are kept, are infinite or NaN where they are pruned, and have a
    product other than 0 there: int64 [4], on the device."""
    mask, values = shard.flat(local_mask), shard.flat(shard.values)
    flat_product = None if product is None else shard.flat(product.detach())
    totals = torch.zeros(4, dtype=torch.int64, device=mask.device)
    for span in _chunks(mask):
        pruned = mask[span] == 0
        zeros = pruned.count_nonzero()
        is_bool = mask.dtype is torch.bool
        ones = pruned.numel() - zeros if is_bool else (mask[span] == 1).count_nonzero()
        infinite = exposed = torch.zeros_like(zeros)
        if values.is_floating_point() or values.is_complex():
            infinite = (pruned > values[span].isfinite()).count_nonzero()
        if flat_product is not None:
            exposed = (pruned > flat_product[span].logical_not()).count_nonzero()
        totals += torch.stack([zeros, ones, infinite, exposed])
    return totals


def _chunks(flat: Tensor) -> Iterator[slice]:
    size = _CPU_CHUNK if memory.takes_numpy(flat.device) else _DEVICE_CHUNK
    for first in range(0, flat.numel(), size):
        yield slice(first, first + size)
