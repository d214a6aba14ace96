"""``is_semi_structured``: which pruned weights torch's semi-structured sparsity can compress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from distprune._common.process_groups import world
from distprune.call.arguments import ParameterArguments
from distprune.call.grouping import InputDims, to_pattern
from distprune.call.semi_structured import SemiStructuredReport, count_fitting
from distprune.masks.hook import find_hook
from distprune.shards.parameter_places import find_places

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_semi_structured(
    model: nn.Module,
    *,
    pattern: str = "2:4",
    input_dims: InputDims | None = None,
    group: ProcessGroup | None = None,
) -> SemiStructuredReport:
    """Say which pruned weights ``torch.sparse.to_sparse_semi_structured`` can compress. Collective.

    A weight fits if of every 4 neighbours along its inputs the mask keeps at most 2, and if one of
    torch's two backends takes its dtype and shape: multiples of 32 x 64 (cutlass) or 16 x 16
    (cusparselt) of float16 and bfloat16, 32 x 32 of float32 (cutlass). Nothing is converted, no
    GPU is needed, and no rank gathers a mask. To convert, on a GPU and after ``remove``::

        linear.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(linear.weight))

    Args:
        model: plain or wrapped.
        pattern: "N:M". The shapes are those for 2:4 whatever it is.
        input_dims: as for ``global_unstructured``. Where the inputs are not known, they are taken
            to lie along the last dimension.
        group: the ranks that take part; every rank by default.

    Returns:
        A report with an entry per pruned parameter, the same on every rank; as a bool, whether
        all of them fit.

    Raises:
        ValueError: a pattern of another form; nothing is pruned; replicas have different masks. On
            every rank.

    Cost: two reads of the masks, and memory for one of float32 and 17 bytes per group; all-reduces
    of 24 bytes per parameter, and of about 50 bytes per group that the sharding cuts.
    """

    def make_arguments() -> ParameterArguments:
        to_pattern(pattern, tiles=False)
        pairs = find_places(model, lambda place: find_hook(*place.pair) is not None)
        if not pairs:
            raise ValueError("nothing is pruned in this model; expected at least one parameter.")
        return ParameterArguments(parameters=pairs, facts=[("pattern", str(pattern))])

    return count_fitting(make_arguments, pattern, input_dims, world(group))
