"""Calibration: text through a model, for activation statistics or for what needs gradients.

[Note: losses] The loss is the mean cross-entropy of the predicted tokens of a batch. Windows
are equally long, so that a batch counts by its number of windows:

    unit          what a unit is                what it counts     the result depends on
    rank_batch    a batch                       windows in it      the batch size
    global_batch  the batches of one step,      windows in them    the batch size, and the number
                  of all data-parallel ranks                       of data-parallel ranks

In the last step, ranks may have batches of unequal sizes, or none. There each rank's loss is
multiplied by its share of the windows and by the number of ranks, by which DDP and FSDP
divide: the gradient is the mean over all tokens of the step. A rank without a batch multiplies by
zero. Sums over units that are linear in the gradient depend on neither.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distprune._transformers.building import decoder_layers
from distprune.api.select import head_of, select
from distprune.base.naming import NamedParameter, full_name, named_modules, unwrap
from distprune.base.pruned_form import orig_key
from distprune.criteria.base import Criterion
from distprune.criteria.gradient_moment import GradientMoment
from distprune.language_models.hidden_states import HiddenStates
from distprune.language_models.loading import require_extra
from distprune.language_models.losses import BatchLosses
from distprune.language_models.running import (
    DataRanks,
    Report,
    Reporter,
    Step,
    accepts,
    check_same,
    in_eval_mode,
    inputs_of,
    output_of,
    steps_of,
)
from distprune.language_models.text import TokenWindows
from distprune.ranks.process_groups import world
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.gradients import GradientStatistics
from distprune.statistics.layers import layout_of
from distprune.statistics.sequential import BlockPasses, prune_sequentially
from distprune.wrappers.wrapper import is_piece_of_flat

if TYPE_CHECKING:
    from typing import TypeGuard


def calibrate(
    model: nn.Module,
    windows: TokenWindows,
    collected: ActivationStatistics | GradientStatistics | Criterion,
    *,
    batch_size: int = 1,
    progress: Report | None = None,
) -> None:
    """Run windows of text through a model, and collect what a score needs. Collective.

    statistics = ActivationStatistics(prune.select(model, types=nn.Linear))
    calibrate(model, windows, statistics)
    statistics.save("statistics.safetensors")

    The data-parallel ranks share the windows, in any number (running.[Note: steps]). Activation
    statistics are then those of one process up to the rounding of fp64, and scores of criteria and
    gradient statistics those of one process with the same units, to 1e-6; see [Note: losses] for
    the units. The model is in evaluation mode meanwhile, and has no gradients afterwards.

    Args:
        model: plain or wrapped; it is called with ``input_ids``, and returns logits. Gradients are
            those of the mean cross-entropy of the next token.
        windows: the same on every rank.
        collected: activation statistics, of one pass; gradient statistics, in which a batch has the
            weight of its number of windows; or a criterion of ``distprune.criteria``: Fisher,
            Taylor, SNIP, GradientMagnitude, Movement, Custom or one of your own. What it has
            collected before stays.
        batch_size: windows that a rank runs at a time.
        progress: called after every step, on every rank.

    Raises:
        ValueError: tokens or positions that the model does not have; ranks with different windows;
            a loss that is not finite, at the window where it is. On every rank.
        RuntimeError: the model has gradients already.
        NotImplementedError: copies of a plain model on several ranks, whose gradients nothing
            averages, with a criterion of global batches; as :func:`running.data_ranks`.
        Exception: of the model, and of ``collected``. Where the forward communicates (FSDP, TP),
            an error on one rank alone leaves the others waiting until the timeout of the
            process group.

    Cost: a forward of each window, where gradients are needed with a backward; without the head of
    the model, if the model can and statistics do not need it. Otherwise what ``collected`` says. On
    the wire 40 bytes per step, and what the forwards and backwards send.
    """
    ranks = check_same(model, windows, batch_size)
    communicator = world()
    communicator.run(lambda: _check_collected(model, collected, ranks))
    steps, losses = steps_of(len(windows), batch_size, ranks), BatchLosses(model)
    reporter = Reporter("calibrate", len(windows), progress)
    run = _Run(model, windows, steps, ranks, losses, reporter)
    with communicator.raising_everywhere(), in_eval_mode(model), torch.inference_mode(False):
        if isinstance(collected, ActivationStatistics):
            run.collect_inputs(collected)
        else:
            with torch.enable_grad(), _gradients_for(model, collected):
                if _reads_rank_batches(collected):
                    run.collect_rank_batches(collected)
                else:
                    assert isinstance(collected, Criterion)
                    run.collect_global_batches(collected)
    communicator.agree()


@dataclass(frozen=True)
class _Run:
    """One calibration, in the steps of this rank."""

    model: nn.Module
    windows: TokenWindows
    steps: list[Step]
    ranks: DataRanks
    losses: BatchLosses
    reporter: Reporter

    def collect_inputs(self, statistics: ActivationStatistics) -> None:
        """Activation statistics: of padding, nothing is collected."""
        arguments: dict[str, Any] = {}
        if accepts(self.model, "logits_to_keep") and not _has_head(self.model, statistics):
            arguments["logits_to_keep"] = 1

        def run(is_padding: bool) -> None:
            for step in self.steps:
                if step.is_padding == is_padding:

                    def forward(step: Step = step) -> None:
                        ids = inputs_of(self.model, self.windows, step.rows)
                        output_of(self.model, input_ids=ids, **arguments)

                    world().run(forward)
                    self.reporter.add(step.num_in_step)

        # Padding comes last, and runs outside of the context.
        with statistics.collecting():
            run(is_padding=False)
        with torch.no_grad():
            run(is_padding=True)

    def collect_rank_batches(self, criterion: GradientMoment | GradientStatistics) -> None:
        """A unit for each batch; padding has the weight 0."""
        with criterion.calibrating():
            for step in self.steps:

                def run(step: Step = step) -> None:
                    with criterion.batch(weight=float(step.num_windows)):
                        self._loss(step).backward()  # type: ignore[no-untyped-call]

                world().run(run)
                self.model.zero_grad()
                self.reporter.add(step.num_in_step)

    def collect_global_batches(self, criterion: Criterion) -> None:
        """A unit for each step."""
        with criterion.calibrating():
            for step in self.steps:
                with criterion.batch(weight=float(step.num_in_step)):
                    self._backward(step)
                self.model.zero_grad()
                self.reporter.add(step.num_in_step)

    def _backward(self, step: Step) -> None:
        """The backward of a batch, as a part of the mean over a step; see [Note: losses]."""
        share = step.num_windows * self.ranks.size / step.num_in_step

        def run() -> None:
            (self._loss(step) * share).backward()  # type: ignore[no-untyped-call]

        world().run(run)

    def _loss(self, step: Step) -> Tensor:
        return self.losses.of_batch(self.windows, step.rows)


def _check_collected(model: nn.Module, collected: object, ranks: DataRanks) -> None:
    kind = type(collected).__name__
    if isinstance(collected, ActivationStatistics):
        return
    if not isinstance(collected, (Criterion, GradientStatistics)):
        raise TypeError(
            f"collected is a {kind}; expected ActivationStatistics, GradientStatistics or a "
            "criterion of distprune.criteria."
        )
    if not _reads_rank_batches(collected) and not ranks.averages_gradients:
        raise NotImplementedError(
            f"{kind} reads averaged gradients, and the model is a plain one on {ranks.size} ranks, "
            "whose gradients nothing averages; expected DistributedDataParallel(model), or FSDP."
        )
    name = next((name for name, p in model.named_parameters() if p.grad is not None), None)
    if name is not None:
        raise RuntimeError(
            f"{name} has a gradient already, and calibration drops gradients; expected none. Call "
            "model.zero_grad() before."
        )


def _reads_rank_batches(
    collected: Criterion | GradientStatistics,
) -> TypeGuard[GradientMoment | GradientStatistics]:
    """Whether a unit is the batch of one rank, whose gradient is not averaged."""
    if isinstance(collected, GradientMoment):
        return collected.unit == "rank_batch"
    return isinstance(collected, GradientStatistics)


@contextlib.contextmanager
def _gradients_for(model: nn.Module, criterion: Criterion | GradientStatistics) -> Iterator[None]:
    """Make no gradients but those that a criterion reads, if the model can; leave none behind.

    DDP and FSDP1 have decided what has gradients when they were made.
    """
    read = {
        id(module._parameters.get(key))
        for module, name in criterion.parameters
        for key in (name, orig_key(name))
    }
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in read]
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()) or any(
        map(is_piece_of_flat, model.parameters())
    ):
        others = []
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
        model.zero_grad()


def _has_head(model: nn.Module, statistics: ActivationStatistics) -> bool:
    """Whether statistics are of the layer that makes logits, as far as it is known."""
    head = head_of(model)
    return head is None or any(module is head for module, _ in statistics.parameters)


R = TypeVar("R")


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model of transformers, in the order in which they run.

    Args:
        model: wrapped or not.

    Raises:
        ValueError: the model does not say which of its modules they are.
    """
    inner: Any = unwrap(model)
    found = decoder_layers(inner)
    if not found:
        raise ValueError(
            f"{type(inner).__name__} does not name its decoder layers; expected a causal language "
            "model of transformers, with _no_split_modules."
        )
    return found


def prune_block_by_block(
    model: nn.Module,
    windows: TokenWindows,
    statistics: ActivationStatistics,
    prune_block: Callable[[list[NamedParameter]], R],
    *,
    batch_size: int = 1,
    progress: Report | None = None,
    storage: torch.device | str | None = None,
) -> list[R]:
    """Prune each decoder layer by the inputs that the pruned layers before it give. Collective.

    def prune_block(parameters):
        return prune.global_unstructured(
            parameters, prune.L1Unstructured, statistics.wanda(parameters), amount=0.5
        )

    reports = prune_block_by_block(model, windows, statistics, prune_block)

    The data-parallel ranks share the windows, in any number, as in ``calibrate``; see
    ``distprune.statistics.prune_sequentially`` for what happens to a block. With ``GramMatrices``
    as statistics, ``prune_block`` may call ``distprune.reconstruct``, too: the layers after it see
    what the new weights give.

    Args:
        model: plain or wrapped.
        windows: the same on every rank.
        statistics: new ones, of parameters of decoder layers.
        prune_block: prunes the (module, name) pairs that it gets.
        batch_size: windows that a rank runs at a time.
        progress: called after every step, on every rank. Each layer runs all windows.
        storage: where each window's hidden states are kept, such as "cpu"; by default where the
            model is.

    Returns:
        What ``prune_block`` returned for each layer that has parameters.

    Raises:
        ValueError: a parameter outside of all decoder layers; and as ``calibrate``. On every rank.
        RuntimeError, NotImplementedError: as ``prune_sequentially``.

    Cost: a forward of the model for each window, and two of each decoder layer; in ``storage`` the
    hidden states of this rank's windows, tokens x width elements. A model whose layers cannot run
    one by one (hidden_states.[Note: a chain]) runs whole for each layer and window.
    """
    ranks = check_same(model, windows, batch_size)
    blocks = world().run(lambda: decoder_blocks(model))
    modules = [{id(module) for module in block.modules()} for block in blocks]
    owners = {id(module) for module, _ in statistics.parameters}
    num_runs = sum(not owners.isdisjoint(of_block) for of_block in modules)
    inside = set().union(*modules)
    outside = [p for p in statistics.parameters if id(p[0]) not in inside]
    if outside:
        raise ValueError(
            f"{len(outside)} parameters of statistics are in no decoder layer, such as one of a "
            f"{type(outside[0][0]).__name__}; expected parameters of decoder layers only. Exclude "
            "the others, as the head."
        )
    steps = steps_of(len(windows), batch_size, ranks)
    reporter = Reporter("calibrate", num_runs * len(windows), progress)

    def forward(step: Step) -> None:
        ids = inputs_of(model, windows, step.rows)
        with statistics.batch(torch.zeros_like(ids) if step.is_padding else None):
            output_of(model, input_ids=ids)
        reporter.add(step.num_in_step)

    communicator = world()
    place = None if storage is None else torch.device(storage)
    states = communicator.run(lambda: HiddenStates(blocks, place))

    def is_chain() -> bool:
        return not int(communicator.max(torch.tensor([int(not states.is_chain)])))

    def catch() -> None:
        for step in steps:
            ids = inputs_of(model, windows, step.rows)
            states.catch(partial(output_of, model, input_ids=ids))

    def collect(number: int, position: int) -> None:
        step = steps[position]
        # FSDP communicates in the forward, also in that of a step that does not count.
        keep = states.tokens(position) if step.is_padding else None
        with statistics.batch(keep):
            states.run(number, position)
        reporter.add(step.num_in_step)

    with in_eval_mode(model), torch.inference_mode(False), torch.no_grad():
        if is_chain():
            with communicator.raising_everywhere():
                catch()
            communicator.agree()
        passes = BlockPasses(collect, states.advance) if is_chain() else None
        if passes is None:
            states.forget()
        return prune_sequentially(
            statistics,
            model,
            blocks,
            steps,
            prune_block,
            forward=forward,
            passes=passes,
        )


# The weights of transformers' fused experts; those of JetMoe are called "weight".
_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")


def linear_layers(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> list[NamedParameter]:
    """The weights of a language model that have activation statistics.

    Args:
        model: of transformers, plain or wrapped.
        include: patterns, as ``select`` takes them; by default all linear layers and fused experts
            but the head, which makes logits, and layers with a forward of their own, such as some
            routers.
        exclude: patterns of those that are left out.

    Returns:
        Weights of nn.Linear, of transformers' Conv1D and of its fused experts, as ``select`` lists
        them.

    Raises:
        ValueError: a pattern that matches nothing; nothing is left.

    Cost: a walk over the modules; no communication.
    """
    require_extra()
    from transformers.pytorch_utils import Conv1D

    experts = {type(module) for _, module in named_modules(model) if _are_fused_experts(module)}
    left_out, types, names = list(exclude), (nn.Linear, Conv1D, *experts), ("weight", *_OF_EXPERTS)
    if include is not None:
        return select(
            model, include=include, exclude=left_out, types=types, names=names, everything=True
        )
    head = head_of(model)
    left_out += [
        glob.escape(path) for path, module in named_modules(model) if path and module is head
    ]
    selected = select(model, None, left_out, types, names, everything=True)
    return [pair for pair in selected if type(pair[0]) in experts or not _has_own_forward(pair[0])]


def without_statistics(model: nn.Module) -> list[str]:
    """Names of weights whose inputs are not seen: some fused experts, and some routers."""
    return [
        full_name(path, name)
        for path, module in named_modules(model)
        for name, parameter in module.named_parameters(recurse=False)
        if (parameter.ndim == 3 and "expert" in path and not _are_fused_experts(module))
        or (isinstance(module, nn.Linear) and parameter.ndim == 2 and _has_own_forward(module))
    ]


def _are_fused_experts(module: nn.Module) -> bool:
    """Whether a module has weights of three dimensions that are known to be fused experts."""
    shape = torch.Size((1, 1, 1))  # nothing but the number of dimensions matters
    layout = layout_of(module, "weight", shape)
    return layout is not None and layout.are_experts


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a linear layer does something else than nn.Linear or transformers' Conv1D."""
    shape = torch.Size((1, 1))  # nothing but the number of dimensions matters
    return layout_of(module, "weight", shape) is None
