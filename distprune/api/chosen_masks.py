"""Masks that no ranking chooses: those of a caller, and those of the zeros in the weights.

with prune.dense_gradients(model):
    ...                                             # choose new masks: drop some, grow others
    prune.set_masks(parameters, masks, optimizer=optimizer)

model = AutoModelForCausalLM.from_pretrained("Llama-3-8B-sparse")  # wrapped or not
distprune.masks_from_zeros(model)  # train: what is zero now stays zero
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from distprune.base.memory import on_host
from distprune.base.naming import (
    NamedParameter,
    Pair,
    checked_pair,
    is_pair,
    label_of,
    tied_places,
    unwrap,
)
from distprune.base.pruned_form import is_dtensor, local_tensor
from distprune.base.report_text import listed
from distprune.base.selecting import reason_of_shape
from distprune.call.reading import read_parameters
from distprune.call.report import MaskUpdate, MaskUpdateReport, PruningReport
from distprune.call.request import (
    Decision,
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
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.shards.parameters import find_places
from distprune.shards.reader import ShardReader
from distprune.shards.shard import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


StateRule = Literal["zero", "keep", "reset"]


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
    with torch.inference_mode(False), torch.no_grad():
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
    masks: Sequence[Tensor] | Mapping[Any, Tensor],
    *,
    optimizer: Any = None,
    state: StateRule = "zero",
    grown: Literal["zero", "keep"] = "zero",
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> MaskUpdateReport:
    """Replace the masks of parameters: elements may be dropped, and grow again. Collective.

    For methods that change their masks while they train (RigL, SET, AC/DC). On every wrapper the
    new masks act as those of any pruning, checkpoints hold them, and ``verify`` knows them. A
    parameter that is not pruned yet becomes so. However often the masks change, the pruning
    container gets one entry. Call it between a backward and the next forward: instead of
    ``optimizer.step()``, as RigL, or after it.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; the same on every rank.
        masks: for each of them a mask, True (or 1) = keep: a sequence in their order, or a mapping
            from pairs or full names. Each is laid out like its parameter, as those of
            :func:`global_mask` and :func:`get_masks` are, or whole and equal on all ranks.
        optimizer: what trains them: a torch.optim.Optimizer, or a wrapper around one, as accelerate
            has it. Without it, its state stays as it is.
        state: what becomes of the optimizer's state (momenta, squared gradients): "zero" sets it to
            zero where an element was dropped or has grown; "keep" leaves it; "reset" forgets the
            whole state, with the number of steps, of each parameter of which an element was
            dropped or has grown. State that is not per element ("step", the factors of Adafactor)
            only changes by "reset".
        grown: the value that an element has after it has grown: "zero" as in RigL, or "keep", the
            unmasked value in ``<name>_orig``, which is the one that it had when it was dropped, but
            for what weight decay has made of it since; zero where parameters are sharded.
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of one model, and each passes the
            parameters, masks and optimizer of its own part (there may be none). Parameters need
            full names, which join them, as for :func:`global_unstructured`.

    Returns:
        A report with the numbers of dropped and grown elements; the same on every rank.

    Raises:
        TypeError, ValueError: arguments of a wrong type, masks for other parameters, values other
            than 0 and 1, replicas that would get different masks, an optimizer without one of
            the parameters. On every rank; nothing has changed then.
        RuntimeError: under FSDP, inside a forward or a backward.
        NotImplementedError: a layout or wrapper that is not supported; "reset" under FSDP1 without
            ``use_orig_params``, where all parameters of a module share one state.

    Cost: a read and a write of the masks, and with state one of it; memory for 2 or 3 bytes per
    element for a moment. Four all-reduces, about 100 bytes per parameter.

    Source: RigL, Evci et al., arXiv 1911.11134; SET, Mocanu et al., arXiv 1707.04780.
    """
    pairs: list[Pair] = []
    method = _GivenMasks(pairs, optimizer, state, grown)

    def make_arguments() -> PruningArguments:
        pairs.extend(parameters)
        return PruningArguments(
            parameters=pairs,
            method=method,
            make_hook=partial(hook_for_chosen_mask, reuse=True),
            importance_scores=_by_pair(pairs, masks),
            scores_name="masks",
            pipeline_parallel=pipeline_parallel,
            facts=[
                ("optimizer", _given(optimizer, pipeline_parallel)),
                ("state", _checked("state", state, ("zero", "keep", "reset"))),
                ("grown", _checked("grown", grown, ("zero", "keep"))),
            ],
        )

    report = prune_parameters(make_arguments, world(group))
    with torch.inference_mode(False):
        method.change_values()
    return MaskUpdateReport(
        tuple(
            MaskUpdate(p.name, p.num_elements, p.num_pruned, num_grown, num_dropped)
            for p, (num_grown, num_dropped) in zip(report.parameters, method.counts, strict=True)
        ),
        report.num_ranks,
        report.num_collectives,
        report.bytes_sent,
        report.seconds,
    )


@dataclass
class _GivenMasks:
    """Decides for given masks; see request.DecidesMasks.

    Attributes:
        pairs: the caller's.
        optimizer, state, grown: as for :func:`set_masks`.
        counts: the numbers of (grown, dropped) elements of every parameter, once it has decided ...
        zeroed: ... and what is to be done on this rank when the masks are attached: tensors, N-d
            views, and where they become zero, ...
        forgotten: ... the parameters whose state the optimizer forgets ...
        places: ... and every (module, name) of the parameters that changed.
    """

    pairs: Sequence[Pair]
    optimizer: Any
    state: str
    grown: str
    counts: list[tuple[int, int]] = field(default_factory=list)
    zeroed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    forgotten: list[Tensor] = field(default_factory=list)
    places: list[Pair] = field(default_factory=list)

    # The masks stand for the scores: those of replicas are compared.
    READS_VALUES = True

    def decide(self, call: PruningCall) -> Decision:
        masks: list[Tensor] = []
        changes: list[tuple[Tensor, Tensor]] = []
        rows: list[list[int]] = []  # this rank's numbers of grown and dropped elements

        def compare() -> Tensor:
            for position, shard in enumerate(call.shards):
                new = call.scores[position]
                if new is None:  # a parameter of another part of a pipeline: no elements
                    new = shard.values
                assert isinstance(new, Tensor)
                check_binary(new, shard.name)
                keep, before = new != 0, call.start_mask(position) != 0
                changes.append((keep & ~before, before & ~keep))
                masks.append(shard.new_mask(call.mask_dtypes[position]).copy_(new))
                counted = slice(shard.counted.start, shard.counted.stop)
                rows.append([int(shard.flat(c)[counted].sum()) for c in changes[-1]])
            return torch.tensor(rows, dtype=torch.int64).view(-1)

        shared = call.communicator.reduce(2 * len(call.shards), compare)
        self.counts = [(grown, dropped) for grown, dropped in shared.view(-1, 2).tolist()]

        def finish() -> LocalMasks:
            self._prepare(call.shards, changes)
            return LocalMasks(masks, [dropped - grown for grown, dropped in rows])

        return Decision(finish)

    def _prepare(self, shards: Sequence[Shard], changes: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Local: everything that may fail, before a mask is attached."""
        reader = ShardReader()
        places: dict[Hashable, list[Pair]] = {}
        for pair in self.pairs:
            identity, _ = reader.identity(unwrap(pair[0]), pair[1])
            places.setdefault(identity, []).extend(tied_places(pair))
        for shard, (has_grown, dropped), counts in zip(shards, changes, self.counts, strict=True):
            if shard.key not in places or not any(counts):
                continue
            self.places += places[shard.key]
            if self.grown == "zero":
                self.zeroed.append((shard.values, has_grown))
            if self.optimizer is None or self.state == "keep":
                continue
            parameter, span = shard.optimizer_tensor
            known = any(p is parameter for g in self.optimizer.param_groups for p in g["params"])
            if not known and parameter.requires_grad:
                raise ValueError(
                    f"{shard.name} is none of the optimizer's parameters; expected the optimizer "
                    "that trains it, made after the model was wrapped."
                )
            if self.state == "zero":
                changed = has_grown | dropped
                self.zeroed += [(state, changed) for state in _states(self.optimizer, shard)]
            elif span is not None:
                raise NotImplementedError(
                    f"{shard.name}: FSDP1 without use_orig_params has one optimizer state for "
                    "all parameters of a wrapped module, so state='reset' would reset "
                    "others too; expected state='zero', or use_orig_params=True."
                )
            else:
                self.forgotten.append(parameter)

    def change_values(self) -> None:
        """Make the changes, in place; nothing here can fail for want of memory."""
        with torch.no_grad():
            for tensor, where in self.zeroed:
                tensor.masked_fill_(where.to(tensor.device), 0)
        for parameter in self.forgotten:  # the next step begins as the first one does
            self.optimizer.state.pop(parameter, None)
        refresh_products(self.places)


def _by_pair(pairs: Sequence[Pair], masks: Any) -> dict[Pair, Tensor]:
    """The masks by (module, name)."""
    places = [checked_pair(pair, f"parameters[{i}]") for i, pair in enumerate(pairs)]
    if isinstance(masks, Mapping):
        own: dict[Any, Pair] = {
            pair.fqn: pair for pair in pairs if isinstance(pair, NamedParameter)
        }
        own |= {(id(module), name): p for (module, name), p in zip(places, pairs, strict=True)}
        found: dict[Pair, Any] = {}
        for key, mask in masks.items():
            pair = own.get((id(unwrap(key[0])), key[1]) if is_pair(key) else key)
            if pair is None:
                raise ValueError(
                    f"masks has the key {key!r:.100}, which is none of the parameters; expected "
                    "their full names, or the (module, name) pairs themselves."
                )
            found[pair[0], pair[1]] = mask
    else:
        if len(masks) != len(pairs):
            raise ValueError(
                f"masks has {len(masks)} elements, for {len(pairs)} parameters; expected one each."
            )
        found = {(pair[0], pair[1]): mask for pair, mask in zip(pairs, masks, strict=True)}
    for position, pair in enumerate(pairs):
        mask = found.get((pair[0], pair[1]))
        if not isinstance(mask, Tensor):
            what = "no mask" if mask is None else f"a {type(mask).__name__} for a mask"
            raise ValueError(
                f"{label_of(pair, position)} has {what}; expected a tensor for every parameter."
            )
    return found


def _given(optimizer: Any, pipeline_parallel: bool) -> str:
    if pipeline_parallel:
        return "that of each part"  # which may have no parameters, and so none
    return "none" if optimizer is None else "given"


def _checked(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{what}={value!r}; expected one of {', '.join(map(repr, allowed))}.")
    return value


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
        if not new or (is_model and not target.values.is_floating_point()):
            continue
        if new + old == target.numel and all_zero != "prune":
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


def _count(targets: list[Shard], communicator: Communicator) -> list[list[int]]:
    """Per parameter: zeros that are not pruned yet, and pruned elements; over all ranks."""

    def count() -> Tensor:
        parts = [count for target in targets for count in _count_local(target)]
        return torch.tensor(on_host(parts), dtype=torch.int64)

    return communicator.reduce(2 * len(targets), count).view(-1, 2).tolist()


def _count_local(shard: Shard) -> tuple[Tensor, Tensor]:
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
