"""How many bytes a plan reads to find its cuts, known from headers alone."""

from __future__ import annotations

from distprune._common.float_formats import PLAIN_FLOATS
from distprune.files.planning import Plan, PlannedGroup

CHUNK = 1 << 19  # elements: the arrays of a step stay below fifty megabytes
# A group of more items, ranked on its own, is counted in one read and cut in another.
MAX_IN_MEMORY = 8 * CHUNK


def bytes_to_count(plan: Plan) -> int:
    """Bytes that are read, over all ranks, to cut the groups that are ranked together.

    More if the keys around a cut do not fit into memory, or the limits of many tensors hold them.
    """
    together = sum(_together(plan, group) for group in plan.groups if group.recipe.is_together)
    return together + bytes_to_add_up(plan)


def bytes_to_add_up(plan: Plan) -> int:
    """Bytes that are read because scores are made of sums along rows and columns."""
    of_ria = [tensor for p, tensor in enumerate(plan.tensors) if plan.recipe_of(p).score == "ria"]
    return 2 * sum(tensor.entry.nbytes for tensor in of_ria)


def bytes_to_count_alone(plan: Plan) -> int:
    """Bytes that are read once more because tensors are too large to be ranked in memory."""
    return sum(
        tensor.entry.nbytes
        for group in plan.groups
        for tensor in plan.tensors[group.first : group.last]
        if group.recipe.scope == "layer"
        and group.recipe.score != "random"
        and tensor.num_groups == 1
        and tensor.entry.numel // group.recipe.group_rule.tile_size > MAX_IN_MEMORY
    )


def _together(plan: Plan, group: PlannedGroup) -> int:
    recipe = group.recipe
    if recipe.score == "random":
        return 0
    entries = [tensor.entry for tensor in plan.tensors[group.first : group.last]]
    if recipe.score == "given" and plan.inputs.given is not None:
        entries = [plan.inputs.given.entries[entry.name] for entry in entries]
    num_bytes = sum(entry.nbytes for entry in entries)
    of_outliers = 3 * num_bytes if recipe.budget == "owl" else 0
    is_wide = recipe.needs_statistics or recipe.tile is not None
    if not is_wide and all(PLAIN_FLOATS[entry.dtype].num_bytes == 2 for entry in entries):
        return num_bytes + of_outliers  # a tally answers everything else
    is_counted = (group.has_limits and recipe.budget is None) or recipe.budget == "lamp"
    return num_bytes * (1 + 2 * (recipe.normalize is not None) + is_counted) + of_outliers
