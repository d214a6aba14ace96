"""Criteria that evaluate the model at other weights than its own: GraSP and SynFlow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from distprune._common import exact_sums
from distprune._common.exact_sums import exponent_of
from distprune._common.process_groups import world
from distprune.api.global_unstructured import global_unstructured
from distprune.call.report import ParameterReport, PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_pruned
from distprune.criteria.base import Criterion
from distprune.masks.values import KeptModel, changed_values, keep_signs, kept_model
from distprune.methods.builtin import LowestScore
from distprune.shards.parameter_places import all_places
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard

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
        reader = ShardReader()
        for parameter, shard in zip(self._tracked, self._read(reader), strict=True):
            managed = reader.managed(parameter.module, parameter.name)
            is_rounded = managed is not None and managed.gathers_in_other_dtype
            if is_rounded or shard.values.dtype.itemsize < 4:
                raise NotImplementedError(
                    f"{shard.name}: {type(self).__name__} needs a model that computes in float32 "
                    f"or float64, and this parameter is {shard.values.dtype}"
                    f"{', gathered in another dtype' if is_rounded else ''}; expected "
                    "model.float() for the time of the measurement, and wrappers without mixed "
                    "precision."
                )

    def update(self, weight: float = 1.0) -> NoReturn:
        """Not available: ``measure`` takes its place."""
        raise NotImplementedError(_NO_UPDATE.format(type(self).__name__))

    @contextmanager
    def batch(self, weight: float = 1.0) -> Iterator[None]:
        """Not available: ``measure`` takes its place."""
        self.update(weight)
        yield

    def _accumulate(
        self, position: int, shard: LocalShard, gradient: Tensor, weight: float
    ) -> NoReturn:
        raise AssertionError("update() is not available, and nothing else accumulates units")

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
    ) -> tuple[list[LocalShard], list[Tensor]]:
        """This rank's part of every gradient that the caller's code leaves; not copies.

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

    def _checked_gradients(self) -> tuple[list[LocalShard], list[Tensor]]:
        with torch.no_grad():
            reader = ShardReader(world(self._group).index, world(self._group).size)
            shards = self._read(reader)
            gradients = self._gradients(reader, shards)
            for shard, gradient in zip(shards, gradients, strict=True):
                if not bool(gradient.isfinite().all()):
                    raise ValueError(f"{shard.name} {self._not_finite}")
        return shards, gradients

    _not_finite = (
        "has a gradient that is not finite; expected finite ones. A gradient scaler is not needed "
        "here."
    )


_NO_UPDATE = (
    "{} has no unit to add: it runs the forwards and backwards itself, because it needs gradients "
    "at other weights; expected measure(...), and then scores()."
)

_CHUNK = 1 << 20


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
    element. On the wire what these backwards send, and about 200 bytes.
    """

    pruning_method = LowestScore
    ACCUMULATORS = ("product",)

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
            shards, gradients = self._measured_gradients(kept, backward)
            direction = [gradient.clone() for gradient in gradients]
            del gradients
            epsilon = self._epsilon(shards, direction)
            difference: list[Tensor] = []
            for sign in (1, -1):
                move = _Move(direction, sign * epsilon)
                with changed_values(self.parameters, move, world(self._group)):
                    _, gradients = self._measured_gradients(kept, backward)
                    if not difference:
                        difference = [gradient.clone() for gradient in gradients]
                    else:
                        for mine, gradient in zip(difference, gradients, strict=True):
                            mine.sub_(gradient)
                    del gradients
        products = [mine.mul_(0.5 / epsilon).float() for mine in difference]
        self._accumulators = {"product": products}
        self.num_updates, self.total_weight = 1, 1.0

    def _score(self, position: int, shard: LocalShard) -> Tensor:
        score = torch.mul(self._accumulator("product", position, shard), shard.values)
        return score.float()

    def _epsilon(self, shards: Sequence[LocalShard], direction: Sequence[Tensor]) -> float:
        """``step`` * RMS(w) / RMS(g) over all parameters and ranks, rounded to a power of two.

        From exact sums: equal on all ranks, and on any sharding of the same numbers.
        """
        communicator = world(self._group)
        pairs = list(zip(shards, direction, strict=True))

        def largest() -> Tensor:
            # Bits of doubles >= 0 are in the order of their values.
            return torch.cat([_largest(t.values for t, _ in pairs), _largest(direction)])

        found = communicator.reduce(2, largest, "max").view(torch.float64).tolist()
        exponents = [exact_sums.exponent_of(value) for value in found]

        def sums() -> Tensor:
            totals = [0, 0]
            for shard, vector in pairs:
                for which, tensor in enumerate((shard.values, vector)):
                    totals[which] += _square_sum(shard, tensor, exponents[which])
            return torch.tensor([exact_sums.to_words(total) for total in totals]).view(-1)

        words = communicator.reduce(4, sums).view(2, 2).tolist()
        norms = [
            exact_sums.statistic("l2", exact_sums.from_words(*pair), exponent, 1)
            for pair, exponent in zip(words, exponents, strict=True)
        ]
        for norm, what in zip(norms, ("weights", "gradients"), strict=True):
            if not norm:
                raise ValueError(
                    f"all {what} of the {len(pairs)} parameters are zero, so all scores of "
                    f"{type(self).__name__} would be; expected {what} other than zero."
                )
        return math.ldexp(1.0, round(math.log2(self._step * norms[0] / norms[1])))


def _largest(tensors: Iterable[Tensor]) -> Tensor:
    """The bits of the largest |value| of all tensors: int64 [1]."""
    found = [tensor.abs().max().double() for tensor in tensors if tensor.numel()]
    zero = torch.zeros(1, dtype=torch.float64)
    return (torch.stack(found).max().cpu().view(1) if found else zero).view(torch.int64)


@dataclass(frozen=True)
class _Move:
    """Moves parameters by a multiple of vectors."""

    vectors: Sequence[Tensor]
    factor: float

    def __call__(self, number: int, values: Tensor) -> None:
        values.add_(self.vectors[number], alpha=self.factor)


def _square_sum(shard: LocalShard, tensor: Tensor, exponent: int) -> int:
    """The sum of squares of what this rank counts of a parameter, on the grid of an exponent."""
    counted = slice(shard.counted.start, shard.counted.stop)
    values = shard.flat(tensor)[counted]
    live = None if shard.mask is None else shard.flat(shard.mask)[counted] != 0
    total = 0
    for start in range(0, values.numel(), _CHUNK):
        span = slice(start, start + _CHUNK)
        keep = None if live is None else live[span]
        total += int(exact_sums.grid_sum_on_device(values[span], exponent, 2, keep))
    return total


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

    ACCUMULATORS = ("flow",)

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
                shards, gradients = self._measured_gradients(kept, backward)
                with torch.no_grad():
                    flows = [
                        torch.mul(gradient, shard.values).abs_()
                        for shard, gradient in zip(shards, gradients, strict=True)
                    ]
                del shards, gradients
            scale = self._scale(flows)
            self._accumulators = {"flow": [flow.mul_(scale).float() for flow in flows]}
        self.num_updates, self.total_weight = 1, 1.0

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
        first = count_pruned(lambda: ParameterArguments(parameters=self.parameters), communicator)
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

    def _scale(self, flows: Sequence[Tensor]) -> float:
        """1, or for float64 the power of two that brings the largest score below 1."""
        if all(flow.dtype is torch.float32 for flow in flows):
            return 1.0

        def largest() -> Tensor:
            found = max((float(flow.max()) for flow in flows if flow.numel()), default=0.0)
            # Bits of doubles >= 0 are in the order of their values.
            return torch.tensor([found], dtype=torch.float64).view(torch.int64)

        found = world(self._group).reduce(1, largest, "max").view(torch.float64)
        return math.ldexp(1.0, -exponent_of(float(found)))

    def _score(self, position: int, shard: LocalShard) -> Tensor:
        return self._accumulator("flow", position, shard).clone()


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
