"""The criteria: sums that are linear in the gradient, and Fisher and Taylor, which are not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distprune.criteria import base
from distprune.criteria.base import Criterion, NonFinite, Part, Power, Unit
from distprune.methods.base import L1Unstructured, LowestScore
from distprune.ranks.collectives import Communicator, over_groups, sum_of_pieces, world
from distprune.shards.reader import ranks_with_shards, unaveraged_gradients
from distprune.wrappers.managed import GradientSource
from distprune.wrappers.masked_value import has_own_property


class GradientMagnitude(Criterion):
    """|g|, where g is the weighted sum of the gradients of all updates.

    The score by which RigL grows connections: under ``prune.dense_gradients`` the highest among
    pruned elements are those whose return would change the loss most. (The absolute value of the
    mean, not the mean of absolute values of ranks.)

    Source: Evci et al., RigL, ICML 2020, arXiv 1911.11134, section 3, part (4).

    Cost: 4 bytes of memory per element; no bytes on the wire in ``update``.
    """

    def _accumulate(self, part: Part, gradient: Tensor, factor: float) -> None:
        part.total.add_(gradient, alpha=factor)

    def _score(self, part: Part) -> Tensor:
        return part.total.abs()


class SNIP(GradientMagnitude):
    """Connection sensitivity: |w * g|, where g is the weighted sum of the gradients of all updates.

    The absolute value is taken once, at the end: with one update per batch, the score is that of
    one batch that holds them all. The weight is that of the moment when ``scores()`` is called.
    (The paper divides by the sum of all scores, which changes no ranking.) On a model that is
    pruned already, as in several rounds, gradients of pruned elements are zero unless they are
    collected in ``prune.dense_gradients``; pruned elements do not compete.

    Source: Lee et al., SNIP, ICLR 2019, arXiv 1810.02340, equations 5 and 6.

    Cost: 4 bytes of memory per element; no bytes on the wire in ``update``.
    """

    _multiplies_weights = True

    def _score(self, part: Part) -> Tensor:
        score = torch.mul(part.total, part.shard.values)
        return score.float().abs_()


class Movement(Criterion):
    """Movement: S = - sum over steps t of g_t * w_t. Signed; the lowest are pruned.

    Weights that move away from zero have high scores, whatever their size: gradient descent makes
    |w| larger where g and w have opposite signs. ``w_t`` is the weight with which the step's
    gradient was computed, so call ``update`` before the optimizer's step. ``weight`` is the factor
    of the step, such as its learning rate.

    On a model that is pruned already, collect gradients inside ``prune.dense_gradients``, as the
    paper does: otherwise the scores of pruned elements do not move. In a ``ScheduledPruner`` these
    never return. With ``global_mask(pairs, k, scores=..., signed=True)`` and ``set_masks``, masks
    are chosen anew among all elements, as in the paper.

    Source: Sanh et al., Movement pruning, NeurIPS 2020, arXiv 2005.07683, equation 3.

    Cost: 4 bytes of memory per element; no bytes on the wire in ``update``.
    """

    pruning_method = LowestScore

    def _accumulate(self, part: Part, gradient: Tensor, factor: float) -> None:
        part.total.addcmul_(gradient, part.shard.values, value=-factor)


Update = Callable[[Tensor, Tensor, Tensor], Tensor]
Finish = Callable[[Tensor, Tensor], Tensor]


class Custom(Criterion):
    """Scores from a function of your own: state = update(weight, gradient, state), elementwise.

        # An exponential average of |w * g|:
        criteria.Custom(pairs, lambda w, g, s: 0.9 * s + 0.1 * (w * g).abs(), unit="global_batch")

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; a tied parameter counts once.
        update: called at each ``criterion.update(weight=...)`` with this rank's part of each
            parameter, three tensors of one shape: the weights, their gradients times the weight
            of the unit, and the state (fp32, zeros at first). Returns the new state, and changes
            none of the three in place. Each element on its own: parts are cut anywhere.
        unit: what a gradient is of. "global_batch" is the averaged gradient. Functions that are
            not linear in it, such as |g| or g^2, give something else for each rank's batch, which
            this class does not see: "rank_batch" raises NotImplementedError.
        score: makes the scores of weights and state; None: the scores are the state.
        signed: False: scores are ranked by |score|. True: the lowest, signed, are pruned.
        group: the ranks that take part; every rank by default.
        non_finite: "refuse" or "skip": see :class:`Criterion`.

    If ``update`` raises, no state has changed: all new ones are computed before any is kept.

    Cost: 4 bytes of memory per element, twice as many inside ``criterion.update``, and what
    ``update`` takes for a parameter; no bytes on the wire in ``update``.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        update: Update,
        *,
        unit: Unit,
        score: Finish | None = None,
        signed: bool = False,
        group: ProcessGroup | None = None,
        non_finite: NonFinite = "refuse",
    ) -> None:
        if unit != "global_batch":
            text = f"unit={unit!r}: Custom reads averaged gradients only; expected "
            raise NotImplementedError(text + "unit='global_batch', or Fisher or Taylor.")
        self.pruning_method = LowestScore if signed else L1Unstructured  # type: ignore[misc]
        self._update, self._finish = update, score
        super().__init__(parameters, group=group, non_finite=non_finite)

    def _prepared(
        self, parts: Sequence[Part], gradients: list[Tensor], weight: float
    ) -> list[Tensor]:
        """The new states: the caller's function may raise."""

        def update(w: Tensor, g: Tensor, state: Tensor) -> Tensor:
            return self._update(w, g if weight == 1.0 else g * weight, state)

        return [
            self._applied(update, "update", part, gradient)
            for part, gradient in zip(parts, gradients, strict=True)
        ]

    def _accumulate(self, part: Part, gradient: Tensor, factor: float) -> None:
        part.total.copy_(gradient)

    def _score(self, part: Part) -> Tensor:
        if self._finish is None:
            return super()._score(part)
        return self._applied(self._finish, "score", part)

    def _applied(
        self, function: Callable[..., object], what: str, part: Part, *gradients: Tensor
    ) -> Tensor:
        """What a function makes of the weights, of gradients if given, and of the state: fp32."""
        state = part.total
        new = function(part.shard.values, *gradients, state.clone())
        if not isinstance(new, Tensor) or new.shape != state.shape or new.is_complex():
            shown = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise ValueError(
                f"{part.label}: {what} returned {shown} for weights of shape "
                f"{tuple(state.shape)}; expected a real tensor of that shape, because it has to "
                "work on each element alone."
            )
        return torch.empty_like(state).copy_(new)


def add_moment(total: Tensor, gradient: Tensor, power: Power, factor: float) -> None:
    """``total += factor * |gradient| ** power``, computed in fp32."""
    if power == 2:
        total.addcmul_(gradient, gradient, value=factor)
    else:
        total.add_(gradient.abs(), alpha=factor)


class RankBatchSums(base.RankBatches):
    """Sums of moments while hooks are on: between two collectives, on entry and on leaving.

    What went wrong inside is raised on all ranks by :meth:`finish`.

    [Note: sums over replicas] Ranks that have the same elements each keep sums of their own
    batches. They are added up at the end, in :meth:`finish`. On a second calibration every replica
    starts with the earlier total: all but the first replica reset theirs to zero, or it would be
    counted once per replica.

    Args:
        sources: where the gradients come from.
        parts: by position, the parameters with their totals so far.
        power: of the moment.
    """

    def __init__(
        self, sources: Sequence[GradientSource], parts: Sequence[Part], power: Power
    ) -> None:
        super().__init__(sources, [part.label for part in parts], power)
        self._parts = parts
        self._order = hashlib.sha256()

    def begin(self) -> None:
        """Reset the earlier total that another replica keeps: see [Note: sums over replicas]."""
        for source in self._sources:
            if any(group.rank() for group in source.replica_groups):
                for position in source.runs:
                    self._parts[position].total.zero_()

    def finish(self, communicator: Communicator, facts: Sequence[tuple[str, str]]) -> None:
        """Add up sums and weights over the ranks that have the same elements.

        Collective over ``communicator``, and over the groups of the sources.

        Args:
            communicator: the ranks of the call.
            facts: what must be equal on all of them.

        Raises:
            RuntimeError: what went wrong in a batch, on any rank.
            ValueError: a sum that is not finite, with the parameter's name.
        """
        communicator.run(self._check, lambda _: facts)
        self._check_order(communicator)
        weight = torch.tensor([self.weight], dtype=torch.float64)
        weights: dict[tuple[ProcessGroup, ...], float] = {(): self.weight}
        for source in self._sources:
            groups, replicas = source.data_groups, source.replica_groups
            if groups not in weights:
                weights[groups] = float(over_groups(groups).reduce_floats(1, lambda: weight))
            summing = over_groups(replicas) if replicas else None
            for position in source.runs:
                if summing is not None:  # does nothing for one rank
                    summing.sum_floats(self._parts[position].total)
                self._parts[position].weight += weights[groups]

    def _add(self, number: int, gradient: Tensor, factor: float) -> None:
        source = self._sources[number]
        group = source.shard_group
        if group is None:
            (position,) = source.runs
            if factor:
                add_moment(self._parts[position].total, gradient, self._power, factor)
            return
        # All ranks that share the leaf sum up here, also a rank whose factor is 0.
        self._order.update(number.to_bytes(4, "big"))
        pieces = source.pieces(gradient)
        if factor:
            pieces = pieces.square_() if self._power == 2 else pieces.abs_()
            pieces.mul_(factor)
        else:
            pieces.zero_()  # not by a product: inf * 0 is NaN
        own = sum_of_pieces(pieces, group)
        for position, run in source.runs.items():
            total = self._parts[position].total
            total.view(-1).add_(own[run].to(total.device))

    def _check(self) -> None:
        if self.problem is not None:
            raise self.problem
        for part in self._parts:
            if not base.is_finite(part.total):
                text = f"{part.label}: the sum of |gradient|^{self._power} is not finite; expected "
                raise ValueError(text + "finite gradients. Under fp16, use a smaller loss scale.")

    def _check_order(self, communicator: Communicator) -> None:
        """Raise unless the ranks of each shard group got gradients of the same leaves in turn."""
        digest = int.from_bytes(self._order.digest()[:7], "big")
        groups = dict.fromkeys(source.shard_group for source in self._sources)
        both = torch.tensor([digest, -digest])
        found = [over_groups([group]).max(both) for group in groups if group is not None]
        error = None
        if any(int(largest.sum()) for largest in found):
            text = "the gradients of sharded parameters came in different orders on the ranks; "
            error = RuntimeError(text + "expected the same path through the same model on each.")
        communicator.agree(error=error)


class GradientMoment(Criterion):
    """factor * |w|^p * E[|g|^p], where the mean goes over units and is weighted.

    Which units are meant makes a difference that no constant mends: ``E[g^2] = E[g]^2 + Var(g)``.

    ``unit="rank_batch"``: g is the gradient of one backward of one rank, before it is averaged. The
    scores are those of one process that runs the batches of all ranks one after the other. Units
    are collected by hooks:

        with criterion.calibrating():          # on all ranks, also on those without data
            for batch in loader:
                with criterion.batch(weight=num_tokens):
                    loss(model, batch).backward()   # exactly one

    ``unit="global_batch"``: g is what ``.grad`` holds when :meth:`update` is called, after the
    wrapper has averaged it over the ranks.

    The weight w is read when ``scores()`` is called, whatever it was when gradients were collected.
    Pruned elements have score 0. Of a matrix that no gradient reached, such as an expert without
    tokens, see base.[Note: no gradient].

    [Note: a mean] What ``update`` and ``batch`` add up is ``weight * |g|^p``, and the scores divide
    by the sum of the weights. Weights are the token counts of the batches, where these differ.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; a tied parameter counts once.
        unit: "rank_batch" or "global_batch".
        group: the ranks that take part; every rank by default. With ``unit="rank_batch"`` also
            the data-parallel ranks of parameters that FSDP does not shard: those of plain and DDP
            modules, by default every rank; those under tensor parallelism, by default none if
            their mesh has all ranks (and it must be given if not). For experts that only some
            ranks have: a criterion of their own, with the group of the ranks that have them.
    """

    _FACTOR: ClassVar[float] = 1.0
    _multiplies_weights = True
    _power: Power = 2

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        unit: Unit,
        group: ProcessGroup | None = None,
    ) -> None:
        if unit not in get_args(Unit):
            raise ValueError(f"unit={unit!r}; expected {' or '.join(map(repr, get_args(Unit)))}.")
        self.unit: Unit = unit
        super().__init__(parameters, group=group)

    def update(self, weight: float = 1.0) -> None:
        """Add the averaged gradient, with ``unit="global_batch"``; see :meth:`Criterion.update`.

        Raises:
            RuntimeError: ``unit="rank_batch"``, which ``.grad`` cannot show.
        """
        if self.unit == "rank_batch":
            text = f"{type(self).__name__} has unit='rank_batch', and .grad has been averaged; "
            raise RuntimeError(text + "expected a backward inside of batch(), in calibrating().")
        super().update(weight)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Collect units inside, by hooks with ``unit="rank_batch"``; they are gone afterwards.

        Collective over ``group`` and over the ranks that have the parameters, when it begins and
        when it ends: every rank enters it, also one that has no batch. (FSDP needs all ranks in
        every backward; a rank without data joins with any batch and ``weight=0``.)

        After an error inside, ``scores()`` raises until :meth:`reset`. An error of one rank is
        raised on the others when they leave the context.

        Raises:
            RuntimeError: calibrating already; at the end, on every rank, a batch of any rank that
                had no backward, or several, or a backward outside of ``batch``.
            ValueError: at the end, on every rank, a sum that is not finite. At the beginning, a
                parameter that was frozen, or whose data-parallel ranks are not known.

        Cost: 4 bytes of memory per element of this rank's shards, for as long as the criterion
        lives. On the wire, on plain and DDP modules: one all-reduce of these at the end; under TP:
        none without ``group``. Under FSDP: in each backward one reduce-scatter of 4 bytes per
        element of each whole parameter, and so much memory for one parameter at a time (FSDP1: one
        flat parameter); HSDP has one all-reduce of the shards in addition, at the end. Gradients
        in low precision are converted one at a time.
        """
        if self.unit == "global_batch":
            with super().calibrating():
                yield
            return
        communicator = self._ranks()

        def attach() -> None:
            communicator.run(self._attach, lambda _: self._facts())
            self._is_incomplete = True
            self._sums.begin()

        def finish() -> None:
            sums: RankBatchSums = self._sums
            sums.finish(communicator, self._facts())
            own = torch.tensor([sums.num_batches, sums.weight], dtype=torch.float64)
            num_batches, weight = communicator.reduce_floats(2, lambda: own).tolist()
            self.num_updates += int(num_batches)
            self.total_weight += weight
            self._is_incomplete = False

        with base.collecting(self, communicator, attach, finish):
            yield

    @contextmanager
    def batch(self, weight: float = 1.0, *, loss_scale: float = 1.0) -> Iterator[None]:
        """One unit: a micro-batch of this rank, whose backward is inside.

        With ``unit="rank_batch"`` exactly one backward; ``.grad`` is neither read nor changed, so
        it does not matter when it is zeroed, and whether the wrapper synchronises (``no_sync``).
        With ``unit="global_batch"``, however many; then ``update(weight)``, and inside of
        ``calibrating`` the gradients are dropped.

        Args:
            weight: how much the unit counts, such as its number of tokens; ranks may differ.
            loss_scale: the factor that the loss was multiplied with (``scaler.get_scale()``, or
                1/A where the loss of A micro-batches is divided by A); gradients are divided by it.

        Raises:
            ValueError: a weight or a loss scale out of range.
            RuntimeError: with ``unit="rank_batch"``, outside of ``calibrating``. What may go wrong
                on one rank alone is raised on all of them, when ``calibrating`` ends.
        """
        if self.unit == "global_batch":
            weight, scale = base.checked_unit(weight, loss_scale)
            with self._dropping_gradients():
                yield
                self._add_unit(weight, scale)
        else:
            with base.rank_batch(self, weight, loss_scale, world(self._group).size):
                yield

    @property
    def _kind(self) -> str:
        return f"{type(self).__name__}, E[|g|^{self._power}], unit={self.unit}"

    def _ranks(self) -> Communicator:
        """All ranks of ``group``, and those that shard parameters with them."""
        return ranks_with_shards([part.shard for part in self._parts()], self._group)

    def _attach(self) -> None:
        """Put hooks on."""
        self._check_complete()
        parts = self._parts()
        for part in parts:
            part.check()
            module, name = part.pair
            if has_own_property(module, name):
                raise NotImplementedError(
                    f"{part.label}: {type(module).__name__} gathers it in a property (SimpleFSDP), "
                    'where gradients of ranks are not seen; expected unit="global_batch".'
                )
        sources = unaveraged_gradients([part.shard for part in parts], self._group)
        self._sums = RankBatchSums(sources, parts, self._power)
        self._sums.attach()

    def _facts(self) -> list[tuple[str, str]]:
        names = " ".join(parameter.label for parameter in self._scored)
        return [("criterion", self._kind), ("parameters", names)]

    def _accumulate(self, part: Part, gradient: Tensor, factor: float) -> None:
        add_moment(part.total, gradient, self._power, factor)

    def _score(self, part: Part) -> Tensor:
        if not part.weight:
            raise ValueError(f"{part.label}: the weights of all its batches are 0; expected more.")
        score = part.total / part.weight
        values = part.shard.live_values().abs()
        for _ in range(self._power):
            score.mul_(values)
        return score.mul_(self._FACTOR)


class Fisher(GradientMoment):
    """Empirical Fisher, or Optimal Brain Damage: 1/2 * w^2 * E[g^2].

    The increase of the loss that removing a weight causes, by a diagonal quadratic model of it
    with the empirical Fisher information in place of the Hessian.

    Args:
        parameters, unit, group: see :class:`GradientMoment`. What is published is the mean over
            samples: ``unit="rank_batch"`` with micro-batches of one sample. The gradient of a
            larger batch is a mean itself, in which the noise of single samples is less.

    Source: LeCun et al., Optimal Brain Damage, NeurIPS 1989; Theis et al., arXiv 1801.05787,
    equation 7 (Fisher); Singh and Alistarh, WoodFisher, arXiv 2004.14340, section 4.

    Cost: see :meth:`GradientMoment.calibrating`; with ``unit="global_batch"`` 4 bytes of memory per
    element, and no bytes on the wire.
    """

    _FACTOR = 0.5


class Taylor(GradientMoment):
    """First-order Taylor expansion of the loss: w^2 * E[g^2], or |w| * E[|g|].

    Args:
        parameters, unit, group: see :class:`GradientMoment`.
        power: 2, the squared change of the loss, or 1, its absolute value.

    Source: Molchanov et al., arXiv 1906.10771, equation 8 (power 2), and arXiv 1611.06440,
    section 2.2 (power 1), each for single weights.

    Cost: as :class:`Fisher`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        unit: Unit,
        power: Power = 2,
        group: ProcessGroup | None = None,
    ) -> None:
        if power not in (1, 2):
            raise ValueError(f"power={power!r}; expected 1 or 2.")
        super().__init__(parameters, unit=unit, group=group)
        self._power = power
