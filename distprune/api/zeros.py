"""``masks_from_zeros``: masks that hold the zeros which are in the weights already.

model = AutoModelForCausalLM.from_pretrained("Llama-3-8B-sparse")  # wrapped or not
distprune.masks_from_zeros(model)  # train: what is zero now stays zero
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator
from distprune._common.memory import on_host
from distprune._common.naming import NamedParameter
from distprune._common.process_groups import world
from distprune._common.report_text import listed
from distprune._common.selecting import reason_of_shape
from distprune.call.reading import read_parameters
from distprune.call.report import PruningReport
from distprune.call.request import Decision, ParameterArguments, PruningArguments, PruningCall
from distprune.call.run import prune_parameters
from distprune.methods.builtin import hook_for_chosen_mask
from distprune.methods.mask_functions import elementwise_decision
from distprune.shards.parameters import Target, find_places
from distprune.shards.shard import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CHUNK = 1 << 22  # elements

Pairs = list[tuple[nn.Module, str]]


def masks_from_zeros(
    parameters: nn.Module | Iterable[tuple[nn.Module, str]],
    *,
    all_zero: Literal["error", "leave", "prune"] = "error",
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> PruningReport:
    """Prune every element that is zero already, so that training keeps it zero. Collective.

    For weights that were pruned before they were loaded, by whatever program. -0.0 is a zero. A
    parameter without a zero gets no mask; one that is pruned already keeps its mask, and its
    other zeros are pruned, too.

    Args:
        parameters: a model, wrapped or not: all its floating-point parameters with two or more
            dimensions larger than 1; or (module, name) pairs, as ``select`` lists them.
        all_zero: what becomes of a parameter that would be pruned entirely: "error"; "leave" it
            without a new mask; "prune" it. (Such a parameter has often been set to zero to be
            trained, as the second matrix of a LoRA adapter.)
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of the model.

    Returns:
        A report on the parameters that have zeros, the same on every rank.

    Raises:
        ValueError: no parameter has a zero outside of its mask; one is zero entirely, with
            ``all_zero="error"``; replicas differ; on every rank, and no module has changed then.
        Exception: as ``global_unstructured``.

    Cost: three reads of the weights and one write of the masks; a few all-reduces, of 50 bytes
    per parameter in all. No weight is communicated.
    """
    communicator = world(group)
    is_model = isinstance(parameters, nn.Module)

    def make_arguments() -> ParameterArguments:
        return ParameterArguments(
            parameters=_pairs_of(parameters, all_zero),
            facts=[("all_zero", str(all_zero)), ("a model is given", str(is_model))],
            pipeline_parallel=pipeline_parallel,
        )

    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        _, targets = read_parameters(make_arguments, communicator)
        counts = _count(targets, communicator)
    chosen: Pairs = []
    num_found, entire = 0, []
    for target, (new, old) in zip(targets, counts, strict=True):
        if not new or (is_model and not target.shard.values.is_floating_point()):
            continue
        if new + old == target.shard.numel and all_zero != "prune":
            entire.append(target.label)
            continue
        num_found += 1
        if target.places:  # here, and not on another rank alone
            first = target.places[0]
            named = NamedParameter(*first, target.label).with_places(target.places)
            chosen.append(named if target.is_named else first)
    if entire and all_zero == "error":
        raise ValueError(
            f"{listed(entire)}: "
            "every element is zero, and would stay zero. Pass all_zero='leave' if such parameters "
            "are to be trained (adapters begin at zero), all_zero='prune' if not, or a list of "
            "parameters without them (select(model, exclude=...))."
        )
    if not num_found:
        raise ValueError(
            f"none of the {len(targets)} parameters has a zero that is not pruned yet; expected "
            "weights that were pruned before. Load them first, and convert their dtype afterwards."
        )
    return prune_parameters(
        lambda: PruningArguments(
            parameters=chosen,
            method=_Zeros(),
            make_hook=hook_for_chosen_mask,
            pipeline_parallel=pipeline_parallel,
        ),
        communicator,
    )


class _Zeros:
    """Decides on masks by the values alone; see request.DecidesMasks."""

    READS_VALUES = True

    def decide(self, call: PruningCall) -> Decision:
        return elementwise_decision(call, lambda values, ones: values != 0)


def _pairs_of(parameters: nn.Module | Iterable[tuple[nn.Module, str]], all_zero: str) -> Pairs:
    if all_zero not in ("error", "leave", "prune"):
        raise ValueError(f"all_zero={all_zero!r}; expected 'error', 'leave' or 'prune'.")
    if isinstance(parameters, nn.Module):
        model = parameters
        return list(find_places(model, lambda place: not reason_of_shape(place.shape)))
    return list(parameters)


def _count(targets: list[Target], communicator: Communicator) -> list[list[int]]:
    """Per parameter: zeros that are not pruned yet, and pruned elements; over all ranks."""

    def count() -> Tensor:
        parts = [count for target in targets for count in _count_local(target.shard)]
        return torch.tensor(on_host(parts), dtype=torch.int64)

    return communicator.reduce(2 * len(targets), count).view(-1, 2).tolist()


def _count_local(shard: LocalShard) -> tuple[Tensor, Tensor]:
    values, mask = shard.flat_values, shard.flat_mask
    new = torch.zeros((), dtype=torch.int64, device=values.device)
    old = torch.zeros_like(new)
    for start in range(shard.counted.start, shard.counted.stop, _CHUNK):
        span = slice(start, min(start + _CHUNK, shard.counted.stop))
        is_zero = values[span] == 0
        if mask is not None:
            is_pruned = mask[span] == 0
            old += is_pruned.sum()
            is_zero &= ~is_pruned
        new += is_zero.sum()
    return new, old
