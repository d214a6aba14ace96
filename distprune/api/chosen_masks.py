"""Masks that no ranking chooses: those of a caller, of a folder, and of the zeros in the weights.

with prune.dense_gradients(model):
    ...                                             # choose new masks: drop some, grow others
    prune.set_masks(parameters, masks, optimizer=optimizer)

model = AutoModelForCausalLM.from_pretrained("Llama-3-8B-sparse")  # wrapped or not
distprune.masks_from_zeros(model)  # train: what is zero now stays zero
distprune.load_masks(model, "Llama-3-8B-sparse")  # or: what ``distprune prune`` has pruned
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import distprune._transformers as _transformers
from distprune.base import memory
from distprune.base.amount import listed
from distprune.base.memory import ordinary_tensors
from distprune.base.naming import NamedParameter, Pair, checked_pair, label_of
from distprune.base.pruned_form import MASK, is_dtensor, local_tensor
from distprune.base.selecting import reason_of_shape
from distprune.call.report import MaskLoadingReport, PruningReport
from distprune.call.request import (
    Decision,
    LocalMasks,
    ParameterArguments,
    PruningArguments,
    PruningCall,
)
from distprune.call.run import Counted, count_live, prune_parameters
from distprune.files.checkpoint import open_checkpoint
from distprune.files.disk import write_atomically
from distprune.files.errors import CheckpointError
from distprune.files.mask_files import MASK_FILE, MaskFile, mask_header, open_masks, read_keep
from distprune.masks import hook as hooks
from distprune.methods.base import elementwise_decision, hook_for_chosen_mask
from distprune.ranks.collectives import Communicator, world
from distprune.shards.reader import Place, ShardReader, all_places, by_parameter, find_places
from distprune.shards.shard import Shard
from distprune.wrappers.held import find_held

_CHUNK = 1 << 20  # elements


def put_masks(
    function: str,
    make_arguments: Callable[[], ParameterArguments],
    decide: Callable[[PruningCall], Decision],
    communicator: Communicator,
    *,
    counted: Counted | None = None,
    reuse: bool = False,
    reads_values: bool = False,
) -> PruningReport:
    """Put on modules the masks that a function decides. Collective.

    Args:
        function: what the report calls it.
        make_arguments, communicator, counted: see :func:`prune_parameters`.
        reuse: leave the container as it is, if its last entry stands for a chosen mask.
        reads_values: whether replicas have to be equal, and not their masks only.
    """
    return prune_parameters(
        lambda: PruningArguments(
            **vars(make_arguments()),
            method=function,
            decide=decide,
            make_hook=partial(hook_for_chosen_mask, reuse=reuse),
            reads_values=reads_values,
        ),
        communicator,
        counted,
    )


def one_each(what: str, values: Any, parameters: Iterable[Pair]) -> dict[Pair, Any]:
    """A sequence of values for some parameters as a dictionary by (module, name), unwrapped.

    Raises:
        TypeError, ValueError: no sequence, or not one value for each parameter; a parameter that
            is listed twice.
    """
    if isinstance(values, (str, Mapping, Tensor)):
        raise TypeError(f"{what} is a {type(values).__name__}; expected a sequence of tensors.")
    places = [checked_pair(pair, f"parameters[{i}]") for i, pair in enumerate(parameters)]
    given = list(values)
    if len(given) != len(places):
        raise ValueError(
            f"{len(given)} {what} for {len(places)} parameters; expected one for each."
        )
    by_place = dict(zip(places, given, strict=True))
    if len(by_place) < len(places):
        raise ValueError("a parameter is listed twice; expected each (module, name) once.")
    return by_place


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
            keep = shard.new_mask(torch.bool).fill_(True)
            if shard.mask is not None:
                keep.copy_(shard.mask != 0)
            masks.append(shard.as_parameter_layout(keep))
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
    pairs = list(parameters)
    zeroed: list[tuple[Tensor, Tensor]] = []  # on this rank, and where it becomes zero
    changed_places: list[Pair] = []

    def read() -> ParameterArguments:
        given = one_each("masks", masks, pairs)
        for position, mask in enumerate(given.values()):
            if not isinstance(mask, Tensor):
                raise TypeError(f"masks[{position}] is a {type(mask).__name__}; expected a tensor.")
        is_given = "per part" if pipeline_parallel else str(optimizer is not None)
        return ParameterArguments(
            parameters=pairs,
            importance_scores=given,
            scores_name="masks",
            pipeline_parallel=pipeline_parallel,
            facts=[("an optimizer is given", is_given)],
        )

    def finish(call: PruningCall) -> LocalMasks:
        new, num_dropped, num_grown = [], [], []
        for position, shard in enumerate(call.shards):
            before = keep = call.start_mask(position) != 0
            if isinstance(shard.scores, Tensor):  # else it is of another part of a pipeline
                hooks.check_binary(shard.scores, shard.name)
                keep = shard.scores != 0
            dropped, grown = before & ~keep, keep & ~before
            counted = slice(shard.counted.start, shard.counted.stop)
            num_dropped.append(int(shard.flat(dropped)[counted].sum()))
            num_grown.append(int(shard.flat(grown)[counted].sum()))
            new.append(shard.new_mask(call.mask_dtypes[position]).copy_(keep))
            changed = dropped | grown
            if shard.places and bool(changed.any()):
                changed_places.extend(shard.places)
                zeroed.append((shard.values, grown))
                zeroed.extend((state, changed) for state in _states(optimizer, shard))
        return new, num_dropped, num_grown

    report = put_masks(
        "set_masks", read, lambda call: Decision(partial(finish, call)), world(group), reuse=True
    )
    with ordinary_tensors(), torch.no_grad():
        for tensor, where in zeroed:
            tensor.masked_fill_(where.to(tensor.device), 0)
        hooks.refresh_products(changed_places)
    return report


def _states(optimizer: Any, shard: Shard) -> list[Tensor]:
    """Views, N-d, of this rank's part of every state that has a value per element."""
    if optimizer is None:
        return []
    parameter, span = shard.optimizer_tensor
    known = any(p is parameter for g in optimizer.param_groups for p in g["params"])
    if not known and parameter.requires_grad:
        raise ValueError(
            f"{shard.name} is none of the optimizer's parameters; expected what trains it."
        )
    found = []
    for key, value in optimizer.state.get(parameter, {}).items():
        # A parameter of one element has the shape of the number of steps.
        if key == "step" or not isinstance(value, Tensor) or value.shape != parameter.shape:
            continue
        if is_dtensor(value) == is_dtensor(parameter):
            local = local_tensor(value.detach())
            found.append(local if span is None else local[span])
    return [tensor for tensor in found if tensor.shape == shard.values.shape]


@contextmanager
def masks_aside(model: nn.Module, *, group: ProcessGroup | None = None) -> Iterator[None]:
    """Take the masks off a model while it is wrapped, and put them back, sharded, afterwards.

    It begins with :func:`get_masks`, and ends with :func:`set_masks`. Inside the context the
    modules are ordinary ones: parameters stand under their own names with their unmasked values,
    and any wrapper takes them::

        with distprune.masks_aside(model):
            parallelize_module(model, mesh, plan)       # or fully_shard, accelerator.prepare, ...

    Args:
        model: pruned, not sharded yet, with the same masks on every rank. Wrappers have to
            keep its modules, as all of torch's do.
        group: the ranks that call this; every rank by default. Collective on entry and on exit.

    Raises:
        ValueError: on entry, a mask with other values than 0 and 1; a tied parameter that is
            pruned differently under its names, or under one only; on exit, ranks with different
            masks.
        RuntimeError: on entry, a mask was deleted.
        NotImplementedError: on entry, a method with an ``apply_mask`` of its own; on exit, a
            wrapper or layout that is not supported.

    On an error every rank raises, and nothing has changed on entry. On an error of the body, or on
    exit, no mask is on the model, on any rank; the error has them all in its attribute ``masks``,
    by full name, so that none is lost: pass them to ``custom_from_mask`` or :func:`set_masks` on a
    model that is wrapped in another way.

    Cost: no copy of a weight; that of the two functions, and a few all-reduces of 40 bytes.
    """
    communicator = world(group)

    def read() -> tuple[list[NamedParameter], list[Tensor]]:
        hooks.check_ties(model)
        for label, module, hook in hooks.pruned_parameters(model):
            hooks.check_binary(module.get_buffer(hook._tensor_name + MASK), label)
            hooks.check_hook(hook, label)
        pairs = find_places(model, _is_pruned)
        return pairs, get_masks(pairs)

    pairs, masks = communicator.run(
        read, lambda found: [("pruned parameters", ", ".join(pair.fqn for pair in found[0]))]
    )
    for _, module, hook in list(hooks.pruned_parameters(model)):
        if hooks.find_hook(module, hook._tensor_name) is hook:  # else it went with another name
            hooks.detach(module, hook, is_final=False)
            hooks.unregister(module, hook._tensor_name)
    try:
        with communicator.raising_everywhere():
            yield
        communicator.agree()  # an error of the body on another rank is raised here
        if pairs:
            set_masks(pairs, masks, group=group)
    except BaseException as error:
        named = zip(pairs, masks, strict=True)
        error.masks = {pair.fqn: mask for pair, mask in named}  # type: ignore[attr-defined]
        raise


def _is_pruned(place: Place) -> bool:
    return hooks.find_hook(*place.pair) is not None


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

    def read() -> ParameterArguments:
        if all_zero not in ("error", "leave", "prune"):
            raise ValueError(f"all_zero={all_zero!r}; expected 'error', 'leave' or 'prune'.")
        pairs, is_model = parameters, isinstance(parameters, nn.Module)
        if isinstance(pairs, nn.Module):
            pairs = find_places(pairs, lambda p: p.is_floating and not reason_of_shape(p.shape))
        return ParameterArguments(
            parameters=pairs,
            facts=[("all_zero", all_zero), ("a model is given", str(is_model))],
            pipeline_parallel=pipeline_parallel,
        )

    counted = count_live(read, communicator, reads_values=True)
    shards = counted[0]
    with communicator.exclusively(), ordinary_tensors(), torch.no_grad():
        kept = communicator.reduce(len(shards), lambda: torch.tensor([*map(_count_kept, shards)]))
    rows = zip(*counted, kept.tolist(), strict=True)
    zeros = [(shard, live, kept) for shard, live, kept in rows if kept < live]
    entire = [shard.name for shard, _, kept in zeros if not kept]
    if entire and all_zero == "error":
        raise ValueError(
            f"{listed(entire)}: every element is zero, and would stay zero; expected "
            "all_zero='leave' (adapters begin at zero), or 'prune', or parameters without them."
        )
    chosen = [(shard, live) for shard, live, kept in zeros if kept or all_zero == "prune"]
    if not chosen:
        raise ValueError(
            f"none of the {len(shards)} parameters has a zero that is not pruned yet; expected "
            "weights that were pruned before."
        )
    return put_masks(
        "masks_from_zeros",
        lambda: ParameterArguments(parameters=(), pipeline_parallel=pipeline_parallel),
        lambda call: elementwise_decision(call, lambda values, ones: values != 0),
        communicator,
        counted=([shard for shard, _ in chosen], [live for _, live in chosen]),
    )


def _count_kept(shard: Shard) -> int:
    """Unpruned elements that are not zero, among those that this rank counts."""
    counted = slice(shard.counted.start, shard.counted.stop)
    values = shard.flat_values[counted]
    if shard.flat_mask is not None:
        values = (values != 0) & (shard.flat_mask[counted] != 0)
    return int(values.count_nonzero())


def save_masks(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    names: Literal["checkpoint", "model"] = "checkpoint",
    group: ProcessGroup | None = None,
    pipeline_parallel: bool = False,
) -> None:
    """Write the masks of a pruned model, in the form that ``distprune prune`` writes. Collective.

    The first rank writes ``folder/distprune/masks.safetensors``; an existing file is replaced
    at the end, or stays as it was.

    Args:
        model: plain or wrapped; a stage, with ``pipeline_parallel``.
        folder: where to write; made if it does not exist. It may be that of a checkpoint.
        names: whose names and shapes masks have. "checkpoint": those of the files that
            ``save_pretrained`` writes of a model of transformers, as ``distprune apply`` needs
            them (experts that are one tensor in the model are several there). "model": those of
            the model; always so for a model of another kind, and with ``pipeline_parallel``.
        group: the ranks that take part; every rank by default.
        pipeline_parallel: the ranks hold different parts of the model.

    Raises:
        ValueError: nothing is pruned; replicas have different masks. On every rank.
        NotImplementedError: transformers computes with a parameter when it saves it; on every
            rank. names="model" writes its mask.
        FilesError: the folder cannot be written to; a RuntimeError on the other ranks.

    Cost: an all-reduce of an eighth of a byte per element, which the first rank keeps twice; on
    every rank, for a moment, one byte per element of a parameter, and on the first one three per
    element of all that are saved together.
    """
    communicator = world(group)

    def read() -> ParameterArguments:
        if names not in ("checkpoint", "model"):
            raise ValueError(f"names={names!r}; expected 'checkpoint' or 'model'.")
        pairs = find_places(model, _is_pruned)
        if not pairs and not pipeline_parallel:
            raise ValueError("nothing is pruned in this model; expected at least one parameter.")
        return ParameterArguments(
            parameters=pairs, facts=[("names", names)], pipeline_parallel=pipeline_parallel
        )

    def plan() -> list[_transformers.SavedMasks]:
        if names == "model" or pipeline_parallel:
            return [((name,), {name: shape}, None) for name, shape in shapes.items()]
        every = {place.pair.fqn: place.shape for place in all_places(model)}
        return _transformers.as_saved(model, every, shapes)

    def write() -> None:
        if communicator.index:
            return
        parts: list[bytes] = []
        for parameters, _, conversion in saved:
            masks = {}
            for name in parameters:
                keep = memory.unpack_words(words[name].numpy(), shapes[name].numel())
                masks[name] = torch.from_numpy(keep).view(shapes[name])
            if conversion is not None:
                masks = conversion.masks(masks.__getitem__)
            parts += [memory.pack(m.reshape(-1).numpy()).tobytes() for m in masks.values()]
        tensors = {name: shape for _, made, _ in saved for name, shape in made.items()}
        are_others = any(parameters != (*made,) for parameters, made, _ in saved)
        header = mask_header(tensors, is_of_checkpoint=are_others)
        write_atomically(Path(folder, MASK_FILE), header + b"".join(parts))

    shards, _ = count_live(read, communicator)
    shapes, words = {shard.name: shard.shape for shard in shards}, dict[str, Tensor]()
    with communicator.exclusively(), torch.inference_mode(False), torch.no_grad():
        saved = communicator.run(plan)
        for shard in shards:
            # Each bit is set by one rank: a sum of them is as good as a union.
            bits = communicator.reduce(-(-shard.numel // 64), partial(_bits_of, shard))
            if communicator.index == 0:
                words[shard.name] = bits
        communicator.run(write)


def _bits_of(shard: Shard) -> Tensor:
    """The bits of a whole mask, 64 to an int64; of those that this rank counts."""
    whole = torch.zeros(shard.numel, dtype=torch.bool)
    for start in range(shard.counted.start, shard.counted.stop, _CHUNK):
        stop = min(start + _CHUNK, shard.counted.stop)
        assert shard.flat_mask is not None  # it is pruned
        keep = shard.flat_mask[start:stop].cpu() != 0
        whole[shard.index(torch.arange(start, stop))] = keep
    return torch.from_numpy(memory.pack_words(whole.numpy()))


def load_masks(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    group: ProcessGroup | None = None,
) -> MaskLoadingReport:
    """Put the masks of a pruned checkpoint onto a model, whatever wraps it. Collective.

    Each rank gets its slice. Parameters are found by their names in the checkpoint. A model of
    transformers may be any that ``from_pretrained`` makes of the checkpoint: with or without the
    prefix of the base model, with parameters that are renamed on loading, and with those that are
    merged, split or transposed (the experts of a mixture), whose masks go the same way. A
    parameter that is pruned already keeps its zeros, too, and a tied one gets those of all its
    names. The weights do not change; what was pruned is zero in the forward, whichever weights the
    model has.

    Args:
        model: plain or wrapped in anything that distprune supports. A stage of a pipeline passes
            strict=False, and as group the ranks of the stage.
        folder: what ``distprune prune`` or :func:`save_masks` wrote, on every rank's disk.
        strict: raise if a mask fits no parameter. If not, the report lists them; and such
            parameters stay as they are. (A fine-tuned model has another head than the checkpoint.)
        group: the ranks that take part; every rank by default.

    Returns:
        A report, the same on every rank.

    Raises:
        ValueError: a mask whose parameter the model does not have, or has in another shape, or
            of which transformers makes something that has no mask, all by name; no mask at all
            fits; ranks that read different masks. On every rank; no module has changed then.
        FilesError: no masks, or malformed ones; on every rank (a RuntimeError where only some
            ranks failed).

    Cost: every rank reads the masks, an eighth of a byte per element; memory for its part of the
    masks and, for a moment, one byte per element of one parameter (two if it is merged or
    permuted on loading).
    """
    communicator = world(group)
    parameters: list[NamedParameter] = []
    sources: dict[str, list[_transformers.MaskSource]] = {}  # a tied parameter may have several
    missing: list[str] = []

    def match() -> tuple[MaskFile, _transformers.Matching]:
        masks, places = open_masks(Path(folder)), list(all_places(model))
        others, is_checkpoint = dict[str, tuple[int, ...]](), masks.is_of_checkpoint
        if is_checkpoint:
            with suppress(CheckpointError):  # the masks were moved away from the weights, say
                others = {t.name: tuple(t.shape) for t in open_checkpoint(Path(folder)).tensors}
        shapes = {place.pair.fqn: place.shape for place in places}
        matching = _transformers.match_masks(
            masks.shapes, shapes, model, is_checkpoint=is_checkpoint, others=others
        )
        for tied in by_parameter(places).values():
            named = [place for place in tied if place.pair.fqn in matching.sources]
            if named:
                parameters.append(named[0].with_all(tied))
                sources[named[0].pair.fqn] = [matching.sources[place.pair.fqn] for place in named]
            elif not reason_of_shape(tied[0].shape):
                missing.append(tied[0].pair.fqn)
        unexpected = matching.unexpected.items()
        problems = [f"{name} ({why or 'no such parameter'})" for name, why in unexpected]
        problems += matching.mismatched.values()
        if problems and (strict or not parameters):
            raise ValueError(
                f"{len(problems)} of the {len(masks.shapes)} masks in {folder} fit no parameter: "
                f"{listed(problems, 8, '; ')}. Expected the model, or the part of yours, that the "
                "masks are for; or strict=False, which loads the others."
            )
        return masks, matching

    def read_mask(name: str) -> Tensor:
        shape = torch.Size(masks.shapes[name])
        return torch.from_numpy(read_keep(masks, name, 0, shape.numel())).view(shape)

    def prune(shard: Shard, mask: Tensor) -> None:
        for source in sources[shard.name] if mask.numel() else ():
            part = shard.slice_of(source.read(read_mask))
            mask.mul_(part.to(mask.device, mask.dtype).view(mask.shape))

    masks, matching = communicator.run(
        match, lambda found: [("crc32 of the masks", _crc(found[0].file.path))]
    )
    report = put_masks(
        "load_masks",
        lambda: ParameterArguments(parameters=parameters, facts=[("strict", str(strict))]),
        lambda call: Decision(
            lambda: call.changed_masks(lambda i, mask: prune(call.shards[i], mask))
        ),
        communicator,
    )
    return MaskLoadingReport(
        **vars(report),
        missing_keys=tuple(missing),
        unexpected_keys=tuple(matching.unexpected),
        mismatched_keys=tuple(matching.mismatched),
    )


def _crc(path: str) -> str:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return str(zlib.crc32(data))


def hold_zeros(model: nn.Module) -> None:
    """Set the pruned elements of a model's sharded parameters to zero. Local.

    Each forward, each state dict and each step of an optimizer of torch does this. Call it after
    anything else that writes weights if they are read before the next of these: the step of an
    optimizer that is not a ``torch.optim.Optimizer``, or a moving average.

    Args:
        model: wrapped or not. Plain parameters, whose masks are factors, do not change.

    Cost: a read of the masks and a write of the weights.
    """
    for _name, module, hook in hooks.pruned_parameters(model):
        held = find_held(module, hook._tensor_name)
        if held is not None:
            held.zero()
