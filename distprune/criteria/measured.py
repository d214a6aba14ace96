"""Criteria that evaluate the model at other weights than its own: GraSP and SynFlow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from distprune._common import exact_sums
from distprune._common.process_groups import world
from distprune.api.global_unstructured import global_unstructured
from distprune.call.report import ParameterReport, PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.criteria.base import Criterion
from distprune.criteria.parts import Part
from distprune.masks.values import KeptModel, changed_values, keep_signs, kept_model
from distprune.methods.builtin import LowestScore
from distprune.selection.normalizing import Scored, grid_sums, largest_scores
from distprune.selection.scores import TensorScores
from distprune.shards.parameters import all_places

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MeasuredCriterion(Criterion):
    """Base of criteria that run forwards and backwards themselves, at other weights.

    ``measure`` takes the place of ``update``. While it runs, parameters have other values
    (masks/values.py); afterwards the model is, bit for bit, what it was: weights, masks, buffers,
    modes of its modules. It has no gradients then.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them, all of them of ``model``.
        model: the whole model, wrapped: what the caller's code calls.
        group: the ranks that take part; every rank by default.

    Raises:
        NotImplementedError: parameters in half precision, or that a wrapper gathers in half
            precision: the measurement would be mostly rounding errors.
        Exception: as :class:`Criterion`.
    """

    _not_finite: ClassVar[str] = (
        "has a gradient that is not finite; expected finite ones. A gradient scaler is not needed "
        "here."
    )

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        model: nn.Module,
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; expected the wrapped model.")
        super().__init__(parameters, group=group)
        self._model = model
        for part in self._parts():
            managed = part.shard.managed
            is_rounded = managed is not None and managed.gathers_in_other_dtype
            dtype = part.shard.values.dtype
            if is_rounded or dtype.itemsize < 4:
                raise NotImplementedError(
                    f"{part.label}: {type(self).__name__} needs a model that computes in float32 "
                    f"or float64, and this parameter is {dtype}"
                    f"{', gathered in another dtype' if is_rounded else ''}; expected "
                    "model.float() for the time of the measurement, and wrappers without mixed "
                    "precision."
                )

    def update(self, weight: float = 1.0) -> NoReturn:
        """Not available: ``measure`` takes its place."""
        raise NotImplementedError(
            f"{type(self).__name__} has no unit to add: it runs the forwards and backwards itself, "
            "because it needs gradients at other weights; expected measure(...), and then scores()."
        )

    @contextmanager
    def batch(self, weight: float = 1.0) -> Iterator[None]:
        """Not available: ``measure`` takes its place."""
        self.update(weight)
        yield

    @contextmanager
    def _measuring(self) -> Iterator[KeptModel]:
        """Run a block that measures: without gradients before, and with none left behind."""
        world(self._group).run(self._check_no_gradients)
        with kept_model(self._model) as kept:
            try:
                yield kept
            finally:
                self._model.zero_grad(set_to_none=True)

    def _check_no_gradients(self) -> None:
        with_gradient = [n for n, p in self._model.named_parameters() if p.grad is not None]
        if with_gradient:
            raise RuntimeError(
                f"{with_gradient[0]} has a gradient, which a measurement by {type(self).__name__} "
                "would overwrite; expected none. Call model.zero_grad() after the optimizer's step."
            )

    def _measured_gradients(
        self, kept: KeptModel, run: Callable[[], Any]
    ) -> tuple[list[Part], list[Tensor]]:
        """This rank's parts, and their gradients as the caller's code leaves them; not copies.

        Every run begins with the same buffers, the same random state and no gradients.
        """
        kept.restore_buffers()
        self._model.zero_grad(set_to_none=True)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
        kind = "cuda" if accelerator is None else accelerator.type
        communicator = world(self._group)
        with (
            communicator.raising_everywhere(),
            torch.random.fork_rng(devices, device_type=kind),
            torch.enable_grad(),
        ):
            run()
        return communicator.run(self._checked_gradients)

    def _checked_gradients(self) -> tuple[list[Part], list[Tensor]]:
        with torch.no_grad():
            parts = self._parts()
            gradients = self._gradients(parts)
            for part, gradient in zip(parts, gradients, strict=True):
                if not bool(gradient.isfinite().all()):
                    raise ValueError(f"{part.label} {self._not_finite}")
        return parts, gradients

    def _keep(self, parts: Sequence[Part], measured: Iterable[Tensor]) -> None:
        """Take what was measured as the only unit."""
        keys = (part.key for part in parts)
        self._accumulators = {k: each.float() for k, each in zip(keys, measured, strict=True)}
        self.num_updates, self.total_weight = 1, 1.0

    def _largest(self, scored: Sequence[Scored], what: str) -> float:
        """The largest |value| of all parameters and ranks. Collective."""
        return max(largest_scores(scored, what, world(self._group)))


class GraSP(MeasuredCriterion):
    r"""Gradient signal preservation: w * (H g), signed; the lowest are pruned.

    g is the gradient of the mean loss over all batches and ranks, H its Hessian, both with respect
    to ``parameters``. The paper removes the weights with the largest -w * (H g). H g is a
    difference of gradients, which every wrapper can compute:

        H g  ~  (gradient at w + eps * g  -  gradient at w - eps * g) / (2 * eps)

    with eps * RMS(g) = ``step`` * RMS(w), rounded to a power of two. (Autograd's second derivative
    needs a graph of the backward, which FSDP does not have.) On a small GELU network the scores
    differ by 3e-5 (float32) and 2e-6 (float64) of their norm from those of the exact Hessian. With
    ReLUs they also have the units that switch between the two points, which autograd leaves out:
    there masks of 50% agreed in 92% to 99% of the pruned weights.

        criterion = GraSP(select(model), model=model)

        def backward():
            for x, y in batches:  # this rank's; the same in every call
                loss_function(model(x), y).backward()

        criterion.measure(backward)
        global_unstructured(
            criterion.parameters, criterion.pruning_method, criterion.scores(), amount=0.9
        )

    Args:
        parameters, model, group: as for every criterion that measures.
        step: the distance of the two points from the weights, as a share of their RMS. A larger one
            has larger errors from higher derivatives, a smaller one from rounding.

    Source: Wang et al., Picking Winning Tickets Before Training by Preserving Gradient Flow, ICLR
    2020, arXiv 2002.07376, equations 8 and 9.

    Cost: three times the forwards and backwards of ``backward``. While it measures, memory for
    three more copies of this rank's shards (weights, g, and a difference); afterwards 4 bytes per
    element. On the wire what these backwards send, and 48 bytes per parameter.
    """

    pruning_method = LowestScore
    ACCUMULATOR = "product"

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        model: nn.Module,
        step: float = 1e-3,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, model=model, group=group)
        if not 0 < step < 1:
            raise ValueError(f"step={step!r}; expected a number between 0 and 1, such as 1e-3.")
        self._step = float(step)

    def measure(self, backward: Callable[[], Any]) -> None:
        """Compute H g. Collective; replaces what was measured before.

        Args:
            backward: runs the forward and backward of all batches of this rank. It is called three
                times, and has to compute the same each time: the same batches, and no random
                numbers but torch's, which begin at the same state in every call (``model.eval()``
                switches dropout off). Gradients of several batches add up. It must not call
                ``zero_grad`` or change weights.

        Raises:
            RuntimeError: the model has gradients already, or a backward is still to come; a
                parameter got no gradient.
            ValueError: a gradient that is not finite; all gradients, or all weights, are zero.

            Exception: of ``backward``, as it is on the rank where it occurs, and as a RuntimeError
                on the others, which wait for each other after each call.
        """
        self.reset()
        with self._measuring() as kept:
            parts, gradients = self._measured_gradients(kept, backward)
            direction = [gradient.clone() for gradient in gradients]
            del gradients
            epsilon = self._epsilon(parts, direction)
            difference: list[Tensor] = []
            for factor in (epsilon, -epsilon):

                def move(number: int, values: Tensor, factor: float = factor) -> None:
                    values.add_(direction[number], alpha=factor)

                with changed_values(self.parameters, move, world(self._group)):
                    _, gradients = self._measured_gradients(kept, backward)
                    if not difference:
                        difference = [gradient.clone() for gradient in gradients]
                    else:
                        for mine, gradient in zip(difference, gradients, strict=True):
                            mine.sub_(gradient)
                    del gradients
        self._keep(parts, (mine.mul_(0.5 / epsilon) for mine in difference))

    def _score(self, part: Part) -> Tensor:
        return torch.mul(self._accumulator(part), part.shard.values).float()

    def _epsilon(self, parts: Sequence[Part], direction: Sequence[Tensor]) -> float:
        """``step`` * RMS(w) / RMS(g) over all parameters and ranks, rounded to a power of two.

        From exact sums: equal on all ranks, and on any sharding of the same numbers.
        """
        norms = []
        values = [part.shard.values for part in parts]
        for what, tensors in (("weights", values), ("gradients", direction)):
            scored = [_scored(part, t) for part, t in zip(parts, tensors, strict=True)]
            exponent = exact_sums.exponent_of(self._largest(scored, what))
            sums = grid_sums(scored, [exponent] * len(scored), 2, world(self._group))
            norms.append(exact_sums.statistic("l2", sum(sums), exponent, 1))
            if not norms[-1]:
                raise ValueError(
                    f"all {what} of the {len(parts)} parameters are zero, so all scores of "
                    f"{type(self).__name__} would be; expected {what} other than zero."
                )
        return math.ldexp(1.0, round(math.log2(self._step * norms[0] / norms[1])))


def _scored(part: Part, tensor: Tensor) -> Scored:
    """A tensor like a parameter, of which the live elements count."""
    return Scored.of_shard(part.shard, TensorScores(part.shard.flat(tensor)))


class SynFlow(MeasuredCriterion):
    """Synaptic flow: |w| * dR/d|w|, where R is the sum of the outputs for an input of ones.

    R is taken of the model with the absolute values of all its parameters and buffers, in
    evaluation mode, so that a chain of linear layers and ReLUs is linear in the input. It needs
    no data, and is meant to be computed again after every small pruning:

        criterion = SynFlow(select(model), model=model)
        report = criterion.prune(lambda: model(torch.ones(1, 3, 32, 32)), sparsity=0.99)

    The theorem of the paper, that no layer collapses before all could, is about networks of linear
    layers, ReLUs and the like, which softmax and layer normalisation are not: for transformers the
    score is a heuristic.

    Averaging over data-parallel ranks changes nothing, as all have the same input. Where their
    number is no power of two it may round: scores then equal those of one process to 1e-6, and
    masks are the same on all ranks.

    Args:
        parameters, model, group: as for every criterion that measures.

    Source: Tanaka et al., Pruning neural networks without any data by iteratively conserving
    synaptic flow, NeurIPS 2020, arXiv 2006.05467, equation 2 and algorithm 1.

    Scores of float64 models are divided by a power of two, so that they fit into float32.

    Cost: a forward and a backward of one input per round, and a pruning; 4 bytes of memory per
    element, and a bit per element of the model for the signs. On the wire what a
    backward and a pruning send, and about 160 bytes a round.
    """

    ACCUMULATOR = "flow"

    _not_finite = (
        "has a gradient that is not finite: the sum of the outputs overflows where all weights "
        "are positive. Expected finite ones: use model.double() for the time of the pruning."
    )

    def measure(self, forward: Callable[[], Tensor]) -> None:
        """Compute the scores at the present masks. Collective; replaces what was measured before.

        Args:
            forward: calls the model with an input of ones (one sample; for a language model
                ``inputs_embeds``), the same on every rank, and returns its output, a tensor.

        Raises:
            TypeError: ``forward`` returned no tensor of floats.
            RuntimeError: the model has gradients already, or a backward is still to come; a
                parameter got no gradient.
            ValueError: an overflow; all gradients are zero.
            Exception: of ``forward``, on every rank.
        """
        self.reset()
        communicator = world(self._group)
        with self._measuring() as kept:

            def backward() -> None:
                self._model.eval()
                kept.change_buffers_to_absolute_values()
                with communicator.raising_everywhere():
                    total = _total(forward())
                communicator.agree()  # a backward of FSDP or DDP waits for all ranks
                total.backward()  # type: ignore[no-untyped-call]

            everything = [place.pair for place in all_places(self._model)]
            with changed_values(everything, _to_absolute, communicator, keep=keep_signs):
                parts, gradients = self._measured_gradients(kept, backward)
                with torch.no_grad():
                    flows = [
                        torch.mul(gradient, part.shard.values).abs_()
                        for part, gradient in zip(parts, gradients, strict=True)
                    ]
                del gradients
            scale = self._scale(parts, flows)
        self._keep(parts, (flow.mul_(scale) for flow in flows))

    def prune(
        self, forward: Callable[[], Tensor], sparsity: float, *, rounds: int = 100
    ) -> PruningReport:
        """Prune in rounds, each by scores of its own. Collective; leaves the masks in force.

        After round e of E, exactly round((1 - (1 - sparsity)**(e / E)) * n) of the n elements of
        all parameters are pruned, those that were pruned before included.

        Args:
            forward: as for :meth:`measure`; called in every round, with the masks in force.
            sparsity: the share of all elements that is pruned in the end, in [0, 1].
            rounds: E.

        Returns:
            A report of all rounds together; its threshold and ties are those of the last.

        Raises:
            ValueError: a sparsity or a number of rounds out of range.
            Exception: as :meth:`measure` and ``global_unstructured``. The masks are then those of
                the rounds before, on every rank.
        """
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity={sparsity!r}; expected a share of all elements, in [0, 1].")
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"rounds={rounds!r}; expected an integer >= 1.")
        started = time.perf_counter()
        communicator = world(self._group)
        arguments = ParameterArguments(parameters=self.parameters)
        first = count_live(lambda: arguments, communicator).entries()
        num_elements = sum(parameter.num_elements for parameter in first)
        num_pruned = sum(parameter.num_pruned_before for parameter in first)
        reports = []
        for number in range(1, rounds + 1):
            share = 1 - (1 - sparsity) ** (number / rounds) if number < rounds else sparsity
            amount = max(0, round(share * num_elements) - num_pruned)
            if not amount and number < rounds:
                continue
            self.measure(forward)
            report = global_unstructured(
                self.parameters,
                self.pruning_method,
                self.scores(),
                amount=amount,
                group=self._group,
            )
            num_pruned += amount
            reports.append(report)
        return _joined(first, reports, num_pruned, time.perf_counter() - started)

    def _scale(self, parts: Sequence[Part], flows: Sequence[Tensor]) -> float:
        """1, or for float64 the power of two that brings the largest score below 1."""
        if all(flow.dtype is torch.float32 for flow in flows):
            return 1.0
        scored = [_scored(part, flow) for part, flow in zip(parts, flows, strict=True)]
        return math.ldexp(1.0, -exact_sums.exponent_of(self._largest(scored, "a measurement")))


def _to_absolute(_: int, values: Tensor) -> None:
    values.abs_()


def _total(output: Tensor) -> Tensor:
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise TypeError(
            f"forward returned a {type(output).__name__}; expected the output of the model, a "
            "tensor of floats (such as .logits of what a transformer returns)."
        )
    return output.sum()


def _joined(
    first: Sequence[ParameterReport],
    reports: Sequence[PruningReport],
    num_pruned: int,
    seconds: float,
) -> PruningReport:
    """One report of all rounds."""
    last = reports[-1]
    return replace(
        last,
        amount=num_pruned - sum(before.num_pruned_before for before in first),
        parameters=tuple(
            replace(
                after,
                num_pruned_before=before.num_pruned_before,
                num_pruned_now=after.num_pruned - before.num_pruned_before,
            )
            for before, after in zip(first, last.parameters, strict=True)
        ),
        num_collectives=sum(report.num_collectives for report in reports),
        bytes_sent=sum(report.bytes_sent for report in reports),
        seconds=seconds,
    )
