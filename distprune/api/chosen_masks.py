"""Masks that no ranking chooses: those of a caller, and those of the zeros in the weights.

with prune.dense_gradients(model):
    ...                                             # choose new masks: drop some, grow others
    prune.set_masks(parameters, masks, optimizer=optimizer)

model = AutoModelForCausalLM.from_pretrained("Llama-3-8B-sparse")  # wrapped or not
distprune.masks_from_zeros(model)  # train: what is zero now stays zero
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from distprune.base.memory import ordinary_tensors
from distprune.base.naming import NamedParameter, Pair, checked_pair, label_of
from distprune.base.pruned_form import is_dtensor, local_tensor
from distprune.base.report_text import listed
from distprune.base.selecting import reason_of_shape
from distprune.call.reading import read_parameters
from distprune.call.report import PruningReport
from distprune.call.request import (
    Decision,
    Fact,
    LocalMasks,
    ParameterArguments,
    PruningArguments,
    PruningCall,
)
from distprune.call.run import prune_parameters
from distprune.masks.checks import check_binary
from distprune.masks.hook import refresh_products
from distprune.methods.base import elementwise_decision
from distprune.methods.builtin import hook_for_chosen_mask
from distprune.ranks.process_groups import world
from distprune.shards.reader import ShardReader, find_places, local_part, whole_checksum
from distprune.shards.shard import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def get_masks(parameters: Iterable[Pair]) -> list[Tensor]:
    """The masks in force, as bool tensors laid out like the parameters. Local.

    Args:
        parameters: (module, name) pairs, pruned or not; those of this rank's part of a pipeline.

    Returns:
        For each pair a new tensor, True = keep: all True if it is not pruned; a DTensor if the
        parameter is one, and under FSDP1 this rank's run, 1-d. :func:`set_masks` and
        :func:`global_mask` take them.

    Raises:
        AttributeError, TypeError, NotImplementedError: a pair that is no parameter, or a layout
            that is not supported.

    Cost: 1 byte per element.
    """
    reader, masks = ShardReader(), []
    with ordinary_tensors(), torch.no_grad():
        for position, pair in enumerate(parameters):
            module, name = checked_pair(pair, f"parameters[{position}]")
            shard = reader.read(module, name, label_of(pair, position))
            local = shard.new_mask(torch.bool).fill_(True)
            if shard.mask is not None:
                local.copy_(shard.mask != 0)
            masks.append(shard.as_parameter_layout(local))
    return masks


def set_masks(
    parameters: Iterable[Pair],
    masks: Sequence[Tensor],
    *,
    optimizer: Any = None,
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> PruningReport:
    """Replace the masks of parameters: elements may be dropped, and grow again. Collective.

    For methods that change their masks while they train (RigL, SET, AC/DC). On every wrapper the
    new masks act as those of any pruning, checkpoints hold them, and ``verify`` knows them. A
    parameter that is not pruned yet becomes so. However often the masks change, the pruning
    container gets one entry. Call it between a backward and the next forward: instead of
    ``optimizer.step()``, as RigL, or after it. An element that grows has the value 0.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; the same on every rank.
        masks: for each of them a mask, True (or 1) = keep. Each is laid out like its parameter, as
            those of :func:`global_mask` and :func:`get_masks` are, or whole and equal on all ranks.
        optimizer: what trains them: a torch.optim.Optimizer, or a wrapper around one, as accelerate
            has it. Its state (momenta, squared gradients) becomes zero where an element was dropped
            or has grown; what is not per element ("step", the factors of Adafactor) stays. Without
            it, the state stays as it is.
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of one model, and each passes the
            parameters, masks and optimizer of its own part (there may be none). Parameters need
            full names, which join them, as for :func:`global_unstructured`.

    Returns:
        A report with the numbers of dropped (``num_pruned_now``) and grown elements; the same on
        every rank.

    Raises:
        TypeError, ValueError: arguments of a wrong type, masks for other parameters, values other
            than 0 and 1, ranks that pass different masks, an optimizer without one of the
            parameters. On every rank; nothing has changed then.
        RuntimeError: under FSDP, inside a forward or a backward.
        NotImplementedError: a layout or wrapper that is not supported.

    Cost: a read and a write of the masks, and with an optimizer one of its state; memory for 2 or 3
    bytes per element for a moment. Three all-reduces, about 70 bytes per parameter.

    Source: RigL, Evci et al., arXiv 1911.11134; SET, Mocanu et al., arXiv 1707.04780.
    """
    method = _GivenMasks(optimizer)

    def make_arguments() -> PruningArguments:
        facts = method.read(parameters, masks)
        is_given = "per part" if pipeline_parallel else str(optimizer is not None)
        return PruningArguments(
            parameters=method.pairs,
            method=method,
            make_hook=partial(hook_for_chosen_mask, reuse=True),
            pipeline_parallel=pipeline_parallel,
            # Ranks of a pipeline have different parameters; masks of replicas are compared anyway.
            facts=[("an optimizer is given", is_given), *([] if pipeline_parallel else facts)],
        )

    report = prune_parameters(make_arguments, world(group))
    with ordinary_tensors(), torch.no_grad():
        for tensor, where in method.zeroed:
            tensor.masked_fill_(where.to(tensor.device), 0)
        refresh_products(method.places)
    return replace(report, method="set_masks")


class _GivenMasks:
    """Decides for given masks; see request.DecidesMasks.

    Attributes:
        pairs: the caller's.
        zeroed: what is to be done on this rank when the masks are attached: tensors, N-d views, and
            where they become zero ...
        places: ... and every (module, name) of the parameters that changed.
    """

    READS_VALUES = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._masks: dict[Hashable, Tensor] = {}
        self.pairs: list[Pair] = []
        self.zeroed: list[tuple[Tensor, Tensor]] = []
        self.places: list[Pair] = []

    def read(self, parameters: Iterable[Pair], masks: Sequence[Tensor]) -> list[Fact]:
        """Read the arguments of :func:`set_masks`; what has to be equal on all ranks. Local."""
        reader = ShardReader()
        self.pairs.extend(parameters)
        if len(masks) != len(self.pairs):
            raise ValueError(
                f"{len(masks)} masks for {len(self.pairs)} parameters; expected one for each."
            )
        facts = []
        for position, (pair, mask) in enumerate(zip(self.pairs, masks, strict=True)):
            module, name = checked_pair(pair, f"parameters[{position}]")
            shard = reader.read(module, name, label_of(pair, position))
            if not isinstance(mask, Tensor):
                raise TypeError(f"masks[{position}] is a {type(mask).__name__}; expected a tensor.")
            known = self._masks.setdefault(shard.key, mask)
            if known is not mask and not torch.equal(local_tensor(known), local_tensor(mask)):
                raise ValueError(
                    f"{shard.name} is tied, and has different masks under its names; "
                    "expected equal ones."
                )
            if shard.is_sharded:  # ranks slice a whole mask
                fact = whole_checksum(mask if mask.dtype is torch.bool else mask != 0, shard)
                facts.append((f"the whole mask of {shard.name}", fact))
        return facts

    def decide(self, call: PruningCall) -> Decision:
        def finish() -> LocalMasks:
            masks, num_dropped, num_grown = [], [], []
            for position, shard in enumerate(call.shards):
                keep, before = self._own_part(shard), call.start_mask(position) != 0
                grown, dropped = keep & ~before, before & ~keep
                counted = slice(shard.counted.start, shard.counted.stop)
                num_grown.append(int(shard.flat(grown)[counted].sum()))
                num_dropped.append(int(shard.flat(dropped)[counted].sum()))
                masks.append(shard.new_mask(call.mask_dtypes[position]).copy_(keep))
                if shard.places and bool((grown | dropped).any()):
                    self._prepare(shard, grown, grown | dropped)
            return LocalMasks(masks, num_dropped, num_grown)

        return Decision(finish)

    def _own_part(self, shard: Shard) -> Tensor:
        """This rank's part of a new mask, bool."""
        mask = self._masks.get(shard.key)
        if mask is None:  # a parameter of another part of a pipeline: no elements
            return shard.values != 0
        part = local_part(shard.name, "masks", mask, shard)
        check_binary(part, shard.name)
        return part != 0

    def _prepare(self, shard: Shard, grown: Tensor, changed: Tensor) -> None:
        """Everything that may fail, before a mask is attached."""
        self.places += shard.places
        self.zeroed.append((shard.values, grown))
        if self._optimizer is None:
            return
        parameter, _ = shard.optimizer_tensor
        known = any(p is parameter for g in self._optimizer.param_groups for p in g["params"])
        if not known and parameter.requires_grad:
            raise ValueError(
                f"{shard.name} is none of the optimizer's parameters; expected the optimizer "
                "that trains it, made after the model was wrapped."
            )
        self.zeroed += [(state, changed) for state in _states(self._optimizer, shard)]


def _states(optimizer: Any, shard: Shard) -> list[Tensor]:
    """Views, N-d, of this rank's part of every state that has a value per element."""
    parameter, span = shard.optimizer_tensor
    found = []
    for key, value in optimizer.state.get(parameter, {}).items():
        # A parameter of one element has the shape of the number of steps.
        if key == "step" or not isinstance(value, Tensor):
            continue
        if value.shape != parameter.shape or is_dtensor(value) != is_dtensor(parameter):
            continue
        local = local_tensor(value.detach())
        found.append(local if span is None else local[span])
    return [tensor for tensor in found if tensor.shape == shard.values.shape]


def masks_from_zeros(
    parameters: nn.Module | Iterable[Pair],
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
        if all_zero not in ("error", "leave", "prune"):
            raise ValueError(f"all_zero={all_zero!r}; expected 'error', 'leave' or 'prune'.")
        pairs: Iterable[Pair] = parameters  # type: ignore[assignment]
        if isinstance(parameters, nn.Module):
            pairs = find_places(parameters, lambda place: not reason_of_shape(place.shape))
        return ParameterArguments(
            parameters=pairs,
            facts=[("all_zero", all_zero), ("a model is given", str(is_model))],
            pipeline_parallel=pipeline_parallel,
        )

    def count(targets: Sequence[Shard]) -> Tensor:
        return torch.tensor([_count(target) for target in targets], dtype=torch.int64).view(-1)

    with communicator.exclusively(), ordinary_tensors(), torch.no_grad():
        _, targets = read_parameters(make_arguments, communicator)
        counts = communicator.reduce(2 * len(targets), lambda: count(targets)).view(-1, 2).tolist()
    chosen: list[Pair] = []
    num_found, entire = 0, []
    for target, (num_left, num_live) in zip(targets, counts, strict=True):
        if num_left == num_live or (is_model and not target.values.is_floating_point()):
            continue
        if not num_left and all_zero != "prune":
            entire.append(target.name)
            continue
        num_found += 1
        if target.places:  # here, and not on another rank alone
            first = target.places[0]
            named = NamedParameter(*first, target.name).with_places(target.places)
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


def _count(shard: Shard) -> tuple[int, int]:
    """Of what this rank counts: unpruned elements that are not zero, and unpruned ones."""
    counted = slice(shard.counted.start, shard.counted.stop)
    values = shard.flat_values[counted]
    if shard.flat_mask is None:
        return int(values.count_nonzero()), values.numel()
    live = shard.flat_mask[counted] != 0
    return int((live & (values != 0)).count_nonzero()), int(live.count_nonzero())


class _Zeros:
    """Decides on masks by the values alone; see request.DecidesMasks."""

    READS_VALUES = True

    def decide(self, call: PruningCall) -> Decision:
        return elementwise_decision(call, lambda values, ones: values != 0)
