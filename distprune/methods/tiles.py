"""The decision of rankings with a pattern of tiles, in any scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distprune._common.amount import Amount, Bounds, checked_count, resolve_count
from distprune.call.grouping import Grouping
from distprune.call.request import Decision, LocalMasks, PruningCall
from distprune.selection.candidates import PartCut, Ranked
from distprune.selection.in_blocks import prune_in_blocks
from distprune.selection.keys import RANDOM_KEYS
from distprune.selection.passes import write_masks
from distprune.selection.search import Selection, select_lowest
from distprune.selection.tiles import RankedTiles, TiledParts, rank_tiles
from distprune.selection.within_bounds import limits_for, select_within


def ranked_in_tiles(
    call: PruningCall,
    grouping: Grouping,
    amount: Amount,
    ranked: Ranked,
    masks: Sequence[Tensor],
    flat_masks: Sequence[Tensor],
) -> Decision:
    """Prune the tiles of the lowest scores, in the order (score, parameter, row-major index).

    Args:
        call: the parameters.
        grouping: its rule has tiles.
        amount: in the scope "global", how many tiles, as a fraction of the live ones or a count;
            the sparsity of the rule, if it has one, counts instead.
        ranked: the elements.
        masks, flat_masks: new masks to write, uninitialised.

    Raises:
        ValueError: a live score is NaN, or a tile has both infinities; on every rank.

    Cost: that of ``rank_tiles``, and of a selection among the tiles.
    """
    is_first_copy = [shard.replica == 0 for shard in call.shards]
    tiled = TiledParts(ranked, grouping.tilings, grouping.rule.tile_size, is_first_copy)
    tiles = rank_tiles(tiled)
    keeps = [torch.empty(part.num_local, dtype=torch.bool) for part in tiles.ranked.parts]
    num_parameters = len(keeps)
    selection: Selection | None = None
    if grouping.rule.scope == "row":
        prune_in_blocks(tiles.ranked, grouping.parameters, keeps)
    else:
        if grouping.rule.scope == "layer":
            cuts = _cuts_of_layers(grouping, tiles)
        else:
            k = _count(grouping, amount, tiles)
            selection = select_lowest(tiles.ranked, k)
            cuts = [PartCut(i, selection.cut) for i in range(num_parameters)]
            selection = selection if k else None
        call.communicator.run(lambda: write_masks(tiles.ranked.parts, cuts, keeps))
    flags = tiles.share_cut(keeps)

    def finish() -> LocalMasks:
        return LocalMasks(masks, tiles.write(flags, flat_masks))

    wanted = grouping.wanted(num_parameters)
    decision = Decision(finish, bound_of=[None] * num_parameters, wanted=wanted)
    if selection is None or tiles.ranked.keys is RANDOM_KEYS:
        return decision
    return replace(
        decision,
        threshold=tiles.ranked.keys.score_of(selection.cut.threshold),
        num_ties=selection.num_ties,
        num_ties_pruned=selection.num_ties_pruned,
    )


def _count(grouping: Grouping, amount: Amount, tiles: RankedTiles) -> int:
    """How many tiles go, of all parameters."""
    num_live = sum(tiles.ranked.num_live)
    if grouping.rule.sparsity is None:
        return checked_count(amount, num_live)
    total = sum(tiles.num_tiles)
    return max(0, resolve_count(grouping.rule.sparsity, total) - (total - num_live))


def _cuts_of_layers(grouping: Grouping, tiles: RankedTiles) -> list[PartCut]:
    """The cut of every parameter, each ranked by itself. What is pruned already counts."""
    assert grouping.rule.sparsity is not None
    num_live = tiles.ranked.num_live
    ends = tuple(
        max(resolve_count(grouping.rule.sparsity, total), total - live)
        for total, live in zip(tiles.num_tiles, num_live, strict=True)
    )
    k = sum(ends) - sum(tiles.num_tiles) + sum(num_live)
    limits = limits_for(k, Bounds(ends, ends), tiles.num_tiles, num_live)
    cuts, _ = select_within(tiles.ranked, k, limits)
    return cuts
