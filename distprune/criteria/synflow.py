"""SynFlow: synaptic flow, in rounds and without data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distprune._common.exact_sums import exponent_of
from distprune._common.process_groups import world
from distprune.api.global_unstructured import global_unstructured
from distprune.call.arguments import ParameterArguments
from distprune.call.report import ParameterReport, PruningReport
from distprune.call.run import count_pruned
from distprune.criteria.measured import MeasuredCriterion
from distprune.masks.values import changed_values, keep_signs
from distprune.shards.parameter_places import all_places
from distprune.shards.shard import LocalShard


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
