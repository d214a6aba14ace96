"""Calibration: text through a model, for statistics, scores, and pruning in rounds by them.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distprune._transformers import decoder_layers
from distprune.api.global_unstructured import global_unstructured
from distprune.api.select import head_of, select
from distprune.base.blocks import WeightLayout
from distprune.base.naming import NamedParameter, Pair, named_modules, unwrap
from distprune.base.pruned_form import ORIG
from distprune.call.report import PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.criteria.base import Criterion
from distprune.criteria.elementwise import Fisher, GradientMoment, Taylor
from distprune.language_models import running
from distprune.language_models.folders import require_extra
from distprune.language_models.hidden_states import HiddenStates
from distprune.language_models.losses import BatchLosses
from distprune.language_models.text import TokenWindows
from distprune.methods.base import L1Unstructured
from distprune.ranks.collectives import world
from distprune.reconstruction import DAMPING, ReconstructionReport, reconstruct
from distprune.shards.reader import Scores
from distprune.statistics.activation import ActivationStatistics, prune_sequentially
from distprune.statistics.gradients import GradientStatistics
from distprune.statistics.gram import GramMatrices
from distprune.statistics.parameters import layout_of
from distprune.wrappers.held import keep_pruned_values
from distprune.wrappers.wrapper import is_piece_of_flat


def calibrate(
    model: nn.Module,
    windows: TokenWindows,
    collected: ActivationStatistics | GradientStatistics | Criterion,
    *,
    batch_size: int = 1,
    progress: running.Report | None = None,
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
    ranks = running.check_same(model, windows, batch_size)
    communicator = world()
    communicator.run(lambda: _check_collected(model, collected, ranks))
    steps, losses = running.steps_of(len(windows), batch_size, ranks), BatchLosses(model)
    finished = running.reporter("calibrate", len(windows), progress)
    with (
        communicator.raising_everywhere(),
        running.in_eval_mode(model),
        torch.inference_mode(False),
    ):
        if isinstance(collected, ActivationStatistics):
            run: Any = partial(
                running.output_of, model, needs_logits=_reads_logits(model, collected)
            )
            with collected.collecting():
                for step in steps:
                    with _batch_of(collected, windows, step):
                        communicator.run(partial(run, windows.tokens[step.rows]))
                    finished(step.num_in_step)
        else:
            # A unit is the batch of a rank, or the batches of a step; see [Note: losses].
            is_of_rank = _reads_rank_batches(collected)
            with (
                torch.enable_grad(),
                gradients_for(model, collected.parameters),
                collected.calibrating(),
            ):
                for step in steps:
                    share = 1.0 if is_of_rank else step.num_windows * ranks.size / step.num_in_step

                    def backward(rows: slice = step.rows, share: float = share) -> None:
                        loss = losses.of_batch(windows, rows) * share
                        loss.backward()  # type: ignore[no-untyped-call]

                    weight = step.num_windows if is_of_rank else step.num_in_step
                    with collected.batch(weight=float(weight)):
                        communicator.run(backward)
                    model.zero_grad()
                    finished(step.num_in_step)
    communicator.agree()


def _batch_of(
    statistics: ActivationStatistics, windows: TokenWindows, step: running.Step
) -> contextlib.AbstractContextManager[None]:
    """Collect from a batch, but nothing if it does not count."""
    keep = None if step.num_windows else torch.zeros_like(windows.tokens[step.rows])
    return statistics.batch(keep)


def _check_collected(model: nn.Module, collected: object, ranks: running.DataRanks) -> None:
    kind = type(collected).__name__
    if isinstance(collected, ActivationStatistics):
        return
    if not isinstance(collected, (Criterion, GradientStatistics)):
        raise TypeError(f"collected is a {kind}; expected statistics, or a criterion.")
    if not _reads_rank_batches(collected) and not ranks.averages_gradients:
        raise NotImplementedError(
            f"{kind} reads averaged gradients, and the model is a plain one on {ranks.size} ranks, "
            "whose gradients nothing averages; expected DistributedDataParallel(model), or FSDP."
        )
    if name := next((name for name, p in model.named_parameters() if p.grad is not None), ""):
        raise RuntimeError(f"{name} has a gradient already; call model.zero_grad() before.")


def _reads_rank_batches(collected: Criterion | GradientStatistics) -> bool:
    """Whether a unit is the batch of one rank, whose gradient is not averaged."""
    return isinstance(collected, GradientStatistics) or (
        isinstance(collected, GradientMoment) and collected.unit == "rank_batch"
    )


def own_parameters(model: nn.Module, parameters: Iterable[Pair]) -> list[nn.Parameter]:
    """Those of a model's parameters that (module, name) pairs are stored in, pruned or not."""
    wanted = {
        id(module._parameters.get(key))
        for module, name in parameters
        for key in (name, name + ORIG)
    }
    return [parameter for parameter in model.parameters() if id(parameter) in wanted]


@contextlib.contextmanager
def gradients_for(model: nn.Module, parameters: Iterable[Pair]) -> Iterator[None]:
    """Make no gradients but those of some parameters, if the model can; leave none behind.

    DDP and FSDP1 have decided what has gradients when they were made.
    """
    read = set(map(id, own_parameters(model, parameters)))
    is_ddp = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    is_fixed = is_ddp or any(map(is_piece_of_flat, model.parameters()))
    others = [
        p for p in model.parameters() if p.requires_grad and id(p) not in read and not is_fixed
    ]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
        model.zero_grad()


def _reads_logits(model: nn.Module, statistics: ActivationStatistics) -> bool:
    """Whether statistics are of the head, or of layers in front of it that make logits with it."""
    inner = unwrap(model)
    base = getattr(inner, "base_model", inner)
    inside = set() if base is inner else {*map(id, base.modules())}
    return not inside.issuperset(id(module) for module, _ in statistics.parameters)


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
    progress: running.Report | None = None,
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

    Returns:
        What ``prune_block`` returned for each layer that has parameters.

    Raises:
        ValueError: a parameter outside of all decoder layers; and as ``calibrate``. On every rank.
        RuntimeError: as ``prune_sequentially``.
        NotImplementedError: layers that cannot run one by one; see hidden_states.[Note: a chain].

    Cost: a forward of the model for each window, and two of each decoder layer; memory for
    the hidden states of this rank's windows, tokens x width elements.
    """
    ranks, communicator = running.check_same(model, windows, batch_size), world()
    blocks = communicator.run(lambda: decoder_blocks(model))
    owners = {id(module) for module, _ in statistics.parameters}
    num_runs = sum(any(id(module) in owners for module in block.modules()) for block in blocks)
    steps = running.steps_of(len(windows), batch_size, ranks)
    finished = running.reporter("calibrate", num_runs * len(windows), progress)
    states = communicator.run(lambda: HiddenStates(blocks))

    def run(number: int, position: int) -> None:
        step = steps[position]
        # FSDP communicates in the forward, also in that of a step that does not count.
        with _batch_of(statistics, windows, step):
            states.run(number, position)
        finished(step.num_in_step)

    with running.in_eval_mode(model), torch.inference_mode(False), torch.no_grad():
        with communicator.raising_everywhere():
            for step in steps:
                states.catch(partial(running.output_of, model, windows.tokens[step.rows]))
        communicator.agree()  # what a rank raised
        if int(communicator.max(torch.tensor([int(not states.is_chain)]))):
            raise NotImplementedError(
                f"the decoder layers of {type(unwrap(model)).__name__} do not run one by one (they "
                "share state, or FSDP1 is around several): expected layers that are called with "
                "what the one before returned. prune_sequentially runs the whole model."
            )
        how: Any = {"run": run, "advance": states.advance}
        return prune_sequentially(statistics, model, blocks, range(len(steps)), prune_block, **how)


# The weights of transformers' fused experts; those of JetMoe are called "weight".
_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")


def linear_layers(
    model: nn.Module, include: Sequence[str] | None = None, exclude: Sequence[str] = ()
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

    layouts = ((module, _layout(module, 3)) for _, module in named_modules(model))
    experts = {type(module) for module, layout in layouts if layout and layout.are_experts}
    head, left_out = head_of(model), list(exclude)
    if include is None:
        paths = (path for path, module in named_modules(model) if path and module is head)
        left_out += map(glob.escape, paths)
    types, names = (nn.Linear, Conv1D, *experts), ("weight", *_OF_EXPERTS)
    selected = select(model, include, left_out, types, names, everything=True)
    return [
        pair
        for pair in selected
        if include is not None or type(pair[0]) in experts or _layout(pair[0], 2) is not None
    ]


def _layout(module: nn.Module, ndim: int) -> WeightLayout | None:
    """How a weight lies; nothing but the number of its dimensions matters."""
    return layout_of(module, "weight", torch.Size((1,) * ndim))


Collected = TypeVar("Collected", bound=ActivationStatistics | GradientStatistics | GradientMoment)

# Those of recipes that need text, and that of SparseGPT, which needs whole Gram matrices.
_FROM_GRADIENTS = ("taylor", "elementwise_fisher")
SCORES = ("wanda", "stade", "ria", "fisher", *_FROM_GRADIENTS, "obs")


def elementwise_criterion(score: str, parameters: Iterable[Pair]) -> GradientMoment:
    """What collects a score of each weight from gradients, by the name that recipes have for it.

    Args:
        score: "taylor": |w| times the mean |gradient| of single batches (of power 1, since that of
            power 2 ranks as Fisher does); "elementwise_fisher": w**2 times the mean of its square.
        parameters: (module, name) pairs.

    Raises:
        ValueError: as the criteria.
    """
    if score == "taylor":
        return Taylor(parameters, unit="rank_batch", power=1)
    return Fisher(parameters, unit="rank_batch")


class TextScores:
    """Scores of a model in memory by text, under the names that recipes have. Collective.

    scores = TextScores(model, windows, parameters)
    prune.global_unstructured(
        parameters, prune.L1Unstructured, scores.of("fisher"), amount=0.6
    )

    What several scores need is collected once: statistics of activations for "wanda", "stade" and
    "ria", of gradients for "fisher", Gram matrices for "obs". "taylor" and "elementwise_fisher" are
    collected each time.

    Args:
        model: plain or wrapped.
        windows: of text, the same on every rank.
        parameters: (module, name) pairs.
        batch_size, progress: as for ``calibrate``.

    Attributes:
        statistics, gradients, grams: what was collected; collective when first asked for.

    Raises: as ``calibrate``, and as what is collected.

    Cost: that of ``calibrate`` for each thing that is collected.
    """

    def __init__(
        self,
        model: nn.Module,
        windows: TokenWindows,
        parameters: Iterable[Pair],
        *,
        batch_size: int = 1,
        progress: running.Report | None = None,
    ) -> None:
        self.model = model
        self.windows = windows
        self.parameters = list(parameters)
        self._options: Any = {"batch_size": batch_size, "progress": progress}

    def of(self, score: str) -> Scores:
        """The scores of all parameters by a name of a recipe, or "obs". Collective.

        Raises:
            ValueError: no such score, or none that needs text.
        """
        if score not in SCORES:
            raise ValueError(f"score={score!r}; expected one of {', '.join(SCORES)}.")
        if score in _FROM_GRADIENTS:
            return self._collected(elementwise_criterion(score, self.parameters)).scores()
        kind = {"fisher": "gradients", "obs": "grams"}.get(score, "statistics")
        return getattr(getattr(self, kind), score)()

    def of_round(self, score: str) -> Scores:
        """The scores of the model as it is now, for ``prune_in_rounds``. Collective.

        For "fisher" the sums of squared gradients stay those of the dense model. In a pruned one
        what is pruned has no gradient, so that a row that lost much would seem to matter little:
        measured in tests/benchmarks/TRIED.md.
        """
        if score == "fisher":
            return self.of(score)
        return TextScores(self.model, self.windows, self.parameters, **self._options).of(score)

    @cached_property
    def statistics(self) -> ActivationStatistics:
        return self._collected(ActivationStatistics(self.parameters))

    @cached_property
    def gradients(self) -> GradientStatistics:
        return self._collected(GradientStatistics(self.parameters))

    @cached_property
    def grams(self) -> GramMatrices:
        return self._collected(GramMatrices(self.parameters))

    def _collected(self, empty: Collected) -> Collected:
        """Run the text."""
        calibrate(self.model, self.windows, empty, **self._options)
        return empty


def prune_in_rounds(
    model: nn.Module,
    windows: TokenWindows,
    parameters: Iterable[Pair],
    sparsities: Sequence[float],
    score: Callable[[], Scores],
    *,
    update: bool = True,
    damping: float = DAMPING,
    batch_size: int = 1,
    progress: running.Report | None = None,
    finished: int = 0,
) -> Iterator[tuple[PruningReport, ReconstructionReport | None]]:
    """Prune globally in rounds, and after each move the kept weights. Collective.

    def score():
        taylor = criteria.Taylor(parameters, unit="rank_batch", power=1)
        calibrate(model, windows, taylor)
        return taylor.scores()

    for pruning, update in prune_in_rounds(model, windows, parameters, [0.35, 0.5, 0.6], score):
        print(pruning.sparsity)  # checkpoint.save here lets a stopped run go on

    With scores by factors nothing is computed anew, and no round has a backward: sums of gradients
    of the dense model (``GradientStatistics``) rank the weights as they are in each round,
    ``score=statistics.fisher``. Of a language model this gave the best result (docs, Moving the
    kept weights).

    In each round: scores and Gram matrices of the model as it is now; then the lowest scores over
    all parameters, until the sparsity is reached; then :func:`distprune.reconstruct`. What was
    pruned stays pruned. A round runs when the next item is asked for; every rank asks for it.

    Args:
        model: plain or wrapped.
        windows: the calibration data, the same on every rank.
        parameters: (module, name) pairs, as ``select`` lists them.
        sparsities: of all parameters together after each round; rising, between 0 and 1.
        score: computes importance scores of the present model; collective.
        update: move the kept weights after each pruning.
        damping: as for ``reconstruct``.
        batch_size, progress: as for :func:`calibrate`, for the Gram matrices.
        finished: rounds that are done already: the model has their masks and weights.

    Yields:
        The report of each round's pruning, and that of the update after it, None without; the same
        on every rank.

    Raises:
        ValueError: sparsities that do not rise between 0 and 1, or below the present one.
        Exception: as ``global_unstructured``, :func:`calibrate` and ``reconstruct``, on every
            rank. Rounds before stay.

    Cost: per round that of the scores, one forward of each window, and that of ``reconstruct``.
    """
    pairs, communicator = list(parameters), world()

    def check() -> None:
        steps = [0.0, *sparsities]
        if not sparsities or steps != sorted(set(steps)) or steps[-1] >= 1:
            raise ValueError(
                f"sparsities={list(sparsities)!r}; expected rising ones between 0 and 1, such as "
                "[0.35, 0.5, 0.6]."
            )

    communicator.run(check, lambda _: [("sparsities", f"{list(sparsities)!r}, {finished!r}")])
    arguments = ParameterArguments(parameters=pairs)
    for number, sparsity in list(enumerate(sparsities))[finished:]:
        shards, num_live = count_live(lambda: arguments, communicator)
        total = sum(shard.numel for shard in shards)
        num_pruned = total - sum(num_live)
        amount = round(sparsity * total) - num_pruned
        if amount < 0:
            raise ValueError(
                f"sparsities[{number}]={sparsity!r}, and {num_pruned / total:.2%} are pruned "
                "already; expected more."
            )
        scores, moved = score(), None
        if update:
            grams = GramMatrices(pairs, allow_empty="*")
            calibrate(model, windows, grams, batch_size=batch_size, progress=progress)
        with keep_pruned_values():
            pruning = global_unstructured(pairs, L1Unstructured, scores, amount=amount)
            if update:
                moved = reconstruct(pairs, grams, damping=damping)
        yield pruning, moved
