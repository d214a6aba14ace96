"""The decision of rankings with a pattern of tiles, in any scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from distprune._common.amount import Amount, Bounds, checked_count, resolve_count
from distprune.call.grouping import Grouping
from distprune.call.request import Decision, LocalMasks, PruningCall
from distprune.selection.candidates import Candidates, PartCut
from distprune.selection.in_blocks import BlockedParts, prune_in_blocks
from distprune.selection.keys import RANDOM_KEYS, KeyRange
from distprune.selection.passes import write_masks
from distprune.selection.search import Selection, select_lowest
from distprune.selection.tiles import RankedTiles, TiledParts, rank_tiles
from distprune.selection.within_bounds import limits_for, select_within


def ranked_in_tiles(
    call: PruningCall,
    grouping: Grouping,
    amount: Amount,
    keys: KeyRange,
    parts: Sequence[Candidates],
    masks: Sequence[Tensor],
    flat_masks: Sequence[Tensor],
) -> Decision:
    """Prune the tiles of the lowest scores, in the order (score, parameter, row-major index).

    Args:
        call: the parameters.
        grouping: its rule has tiles.
        amount: in the scope "global", how many tiles, as a fraction of the live ones or a count;
            the sparsity of the rule, if it has one, counts instead.
        keys: the range of the elements' keys.
        parts: this rank's part of every parameter.
        masks, flat_masks: new masks to write, uninitialised.

    Raises:
        ValueError: a live score is NaN, or a tile has both infinities; on every rank.

    Cost: that of ``rank_tiles``, and of a selection among the tiles.
    """
    names = [shard.name for shard in call.shards]
    tiled = TiledParts(
        parts, names, grouping.tilings, grouping.rule.tile_size, call.num_live,
        [shard.replica == 0 for shard in call.shards], keys, call.communicator,
    )  # fmt: skip
    tiles = rank_tiles(tiled)
    keeps = tiles.new_masks()
    selection: Selection | None = None
    if grouping.rule.scope == "row":
        rows = BlockedParts(
            tiles.parts, names, grouping.parameters, tiles.num_live, keeps, tiles.keys,
            call.communicator,
        )  # fmt: skip
        prune_in_blocks(rows)
    else:
        if grouping.rule.scope == "layer":
            cuts = _cuts_of_layers(call, grouping, names, tiles)
        else:
            k = _count(grouping, amount, tiles)
            selection = select_lowest(
                tiles.parts, names, tiles.num_live, k, tiles.keys, call.communicator,
                refuse_nan=False,
            )  # fmt: skip
            cuts = [PartCut(i, selection.cut) for i in range(len(names))]
            selection = selection if k else None
        call.communicator.run(lambda: write_masks(tiles.parts, cuts, keeps))
    flags = tiles.share_cut(keeps)

    def finish() -> LocalMasks:
        return LocalMasks(masks, tiles.write(flags, flat_masks))

    wanted = grouping.wanted(len(names))
    decision = Decision(finish, bound_of=[None] * len(names), wanted=wanted)
    if selection is None or tiles.keys is RANDOM_KEYS:
        return decision
    return replace(
        decision,
        threshold=tiles.keys.score_of(selection.cut.threshold),
        num_ties=selection.num_ties,
        num_ties_pruned=selection.num_ties_pruned,
    )


def _count(grouping: Grouping, amount: Amount, tiles: RankedTiles) -> int:
    """How many tiles go, of all parameters."""
    num_live = sum(tiles.num_live)
    if grouping.rule.sparsity is None:
        return checked_count(amount, num_live)
    total = sum(tiles.num_tiles)
    return max(0, resolve_count(grouping.rule.sparsity, total) - (total - num_live))


def _cuts_of_layers(
    call: PruningCall, grouping: Grouping, names: Sequence[str], tiles: RankedTiles
) -> list[PartCut]:
    """The cut of every parameter, each ranked by itself. What is pruned already counts."""
    assert grouping.rule.sparsity is not None
    ends = tuple(
        max(resolve_count(grouping.rule.sparsity, total), total - live)
        for total, live in zip(tiles.num_tiles, tiles.num_live, strict=True)
    )
    k = sum(ends) - sum(tiles.num_tiles) + sum(tiles.num_live)
    limits = limits_for(k, Bounds(ends, ends), tiles.num_tiles, tiles.num_live)
    cuts, _ = select_within(
        tiles.parts, names, tiles.num_live, k, tiles.keys, call.communicator, limits
    )
    return cuts
