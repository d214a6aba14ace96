"""Criterion: what every accumulator of scores has in common.

A criterion reads this rank's part of each parameter and of its gradient, and keeps what it sums up
in accumulators of the same layout. So what it costs in memory is sharded as the model is.
Totals are laid out like their parameters, so that checkpoints reshard them; not those of runs.

What is not linear in the gradient has to see the gradient of each rank, by hooks, before the ranks
average them: ``E[g^2] = E[g]^2 + Var(g)``. Criteria and statistics of gradients collect such
batches in the same way.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.conv import _ConvNd

from distprune.base.naming import checked_pair, label_of, unwrap
from distprune.base.pruned_form import is_dtensor
from distprune.call.reading import SignedScores
from distprune.files.statistics_file import means_of_siblings
from distprune.methods.base import BasePruningMethod, L1Unstructured
from distprune.ranks.collectives import Communicator, world
from distprune.shards import reader
from distprune.shards.shard import Shard
from distprune.wrappers.managed import GradientSource, StoredRun

Power = Literal[1, 2]


def checked_unit(weight: float, loss_scale: float = 1.0) -> tuple[float, float]:
    """The weight of a unit and the factor of its loss, as floats.

    Raises:
        ValueError: a weight that is no finite number >= 0, a factor that is none > 0.
    """
    weight, loss_scale = float(weight), float(loss_scale)
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight={weight!r}; expected a finite number >= 0.")
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale={loss_scale!r}; expected a finite number > 0.")
    return weight, loss_scale


class RankBatches(ABC):
    """Batches of this rank, each with one backward; :meth:`_add` gets their gradients.

    What goes wrong inside (no backward in a batch, two of them) may go wrong on one rank alone, so
    it is remembered, and raised on all ranks when the hooks are taken off.

    Args:
        sources: where the gradients come from.
        labels: of the parameters, by position.
        power: of the gradients that are added up.

    Attributes:
        num_batches: of this rank.
        weight: the sum of their weights.
        problem: what went wrong on this rank, if anything did.
    """

    def __init__(
        self, sources: Sequence[GradientSource], labels: Sequence[str], power: Power
    ) -> None:
        self._sources, self._labels, self._power = sources, labels, power
        self._factor: float | None = None  # of the present batch
        self._num_gradients = [0] * len(sources)  # in it
        self.num_batches, self.weight = 0, 0.0
        self.problem: RuntimeError | None = None

    @abstractmethod
    def _add(self, number: int, gradient: Tensor, factor: float) -> None:
        """Add the gradient of a source, which belongs to autograd; 0: one that does not count."""

    def attach(self) -> None:
        """Put the hooks on; after an error :meth:`detach` takes off those that are on."""
        for number, source in enumerate(self._sources):
            source.attach(functools.partial(self._receive, number))

    def detach(self) -> None:
        """Take the hooks off."""
        for source in self._sources:
            source.detach()

    @contextmanager
    def batch(self, weight: float, loss_scale: float) -> Iterator[None]:
        """One backward inside; ``|gradient| ** power`` counts ``weight`` times, unscaled."""
        if self._factor is not None:
            raise RuntimeError("batch() inside of batch(); expected one after the other.")
        self._num_gradients = [0] * len(self._sources)
        self._factor = weight / loss_scale**self._power
        try:
            yield
        except BaseException:
            self._note("a batch ended with an error, after some of its gradients were added up")
            raise
        finally:
            self._factor = None
        if weight and not any(self._num_gradients):
            self._note("a batch had no gradient of any parameter; expected a backward inside")
        self.num_batches += 1
        self.weight += weight

    def _receive(self, number: int, gradient: Tensor) -> None:
        self._num_gradients[number] += 1
        count, factor = self._num_gradients[number], self._factor
        name = self._labels[next(iter(self._sources[number].runs))]
        if factor is None:
            self._note(
                f"{name} got a gradient outside of batch(); expected every backward inside of one"
            )
        elif count > 1:
            factor = None
            self._note(
                f"{name} got {count} gradients in one batch; expected one backward in each "
                "batch(), and checkpointing with use_reentrant=False"
            )
        self._add(number, gradient, factor or 0.0)

    def _note(self, problem: str) -> None:
        self.problem = self.problem or RuntimeError(f"{problem}.")


# What collects batches of single ranks has them in its attribute ``_sums``, which is a RankBatches
# while a calibration is open, and None outside.


@contextmanager
def collecting(
    owner: Any, ranks: Communicator, attach: Callable[[], None], finish: Callable[[], None]
) -> Iterator[None]:
    """Collect batches of single ranks inside. Collective when it begins and when it ends.

    Args:
        owner: what collects them.
        ranks: all that take part.
        attach: sets ``_sums`` of the owner, and puts its hooks on.
        finish: adds up what the ranks have seen.
    """
    if owner._sums is not None:
        raise RuntimeError("calibrating() inside of calibrating(); expected one at a time.")
    try:
        with torch.inference_mode(False), torch.no_grad(), ranks.exclusively():
            attach()
        with ranks.raising_everywhere():
            yield
        with torch.inference_mode(False), torch.no_grad(), ranks.exclusively():
            finish()
    finally:
        sums, owner._sums = owner._sums, None
        if sums is not None:  # also if another rank has failed
            sums.detach()


@contextmanager
def rank_batch(owner: Any, weight: float, loss_scale: float, num_ranks: int) -> Iterator[None]:
    """One unit: a batch of this rank, with one backward inside."""
    sums = owner._sums
    if sums is None:
        raise RuntimeError("batch() outside of calibrating(); expected it inside.")
    with sums.batch(*checked_unit(weight, loss_scale)):
        yield
    if sums.problem is not None and num_ranks == 1:
        raise sums.problem


def check_between(owner: Any) -> None:
    """Raise RuntimeError inside of a calibration."""
    if owner._sums is not None:
        raise RuntimeError("ranks have not added up what they saw yet: only after calibrating()")


@dataclass(eq=False)
class Part:
    """This rank's part of a parameter that a criterion scores, and what was added up for it.

    Attributes:
        pair: (module, name) as the caller gave it.
        label: its full name, or what stands for it in messages.
        key: the same on any sharding, for state dicts: its full name, or its place in the list.
        shard: this rank's part of the parameter, as it was when it was read last.
        weight: the sum of the weights of its units.
    """

    pair: tuple[nn.Module, str]
    label: str
    key: str
    shard: Shard
    weight: float = 0.0
    _total: Tensor | None = None

    def read(self, shard_reader: reader.ShardReader) -> Part:
        """Read this rank's part of the parameter anew."""
        self.shard = shard_reader.read(unwrap(self.pair[0]), self.pair[1], self.label)
        return self

    def reset(self) -> None:
        """Forget all units."""
        self.weight, self._total = 0.0, None

    def check(self) -> None:
        """Raise if the parameter is frozen or lies in another way; else there is a total then."""
        reader.check_trainable(self.shard)
        self._total = self.total

    @property
    def total(self) -> Tensor:
        """What was added up: fp32, like this rank's values, zeros at first."""
        values = self.shard.values
        if self._total is None:
            self._total = torch.zeros_like(values, dtype=torch.float32)
        if self._total.shape != values.shape:
            shapes = f"{tuple(values.shape)}, and had {tuple(self._total.shape)} before"
            text = f"{self.label}: this rank's part has shape {shapes}; expected a model that is "
            raise RuntimeError(text + "wrapped before the criterion is made, and not again.")
        return self._total

    @property
    def num_matrices(self) -> int:
        """A parameter of three dimensions is a stack of matrices, such as fused experts."""
        is_stack = len(self.shard.shape) == 3 and not isinstance(self.pair[0], _ConvNd)
        return self.shard.shape[0] if is_stack else 1

    def matrices(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """Views [rows, ...] of a local tensor, each of one matrix, and the numbers of these."""
        if self.num_matrices > 1:
            return self.shard.channels(local, 0)
        return local.unsqueeze(0).unsqueeze(-1), torch.zeros(1, dtype=torch.int64)

    def sums(self, local: Tensor) -> Tensor:
        """The sums of a local tensor over each matrix: fp64 [matrices], on the CPU."""
        rows, numbers = self.matrices(local)
        of_rows = rows.flatten(1).sum(1, dtype=torch.float64).cpu()
        return torch.zeros(self.num_matrices, dtype=torch.float64).index_add_(0, numbers, of_rows)

    def to_save(self) -> Tensor | dict[str, Tensor]:
        """The total in the form of its parameter, of the same memory; a run by its place.

        Raises:
            NotImplementedError: DCP of this torch cannot save it.
        """
        if self._place is not None:
            return {self._place: self.total} if self.total.numel() else {}
        tensor = self.shard.as_parameter_layout(self.total)
        if is_dtensor(tensor):
            reader.check_saveable(self.label, tensor)
        return tensor

    def loader(self, value: Any) -> Callable[[], object]:
        """What copies a saved total, in the form of :meth:`to_save` or whole, into this one.

        Raises:
            ValueError: another shape or layout.
        """
        label, shard, total = self.label, self.shard, self.total
        if isinstance(value, Mapping):
            if total.numel() and self._place not in value:
                raise ValueError(
                    f"{label}: the state has the runs {list(value)} on this rank, and not "
                    f"{self._place}; expected the state of a model that is sharded in the same way."
                )
            value = value.get(self._place, total)
        if not isinstance(value, Tensor):
            raise ValueError(f"{label}: the state has a {type(value).__name__}; expected a tensor.")
        reader.local_part(label, "the state", value, shard)
        return lambda: total.copy_(reader.local_part(label, "the state", value, shard))

    @property
    def _place(self) -> str | None:
        """Where this rank's run is in the parameter's memory; None if it has no run."""
        managed = self.shard.managed
        if not isinstance(managed, StoredRun):
            return None
        return f"{managed.start}:{managed.start + self.total.numel()}"


def scored_parameters(parameters: Iterable[tuple[nn.Module, str]]) -> tuple[Part, ...]:
    """The parameters of some pairs, each once.

    Raises:
        TypeError: no (module, name) pairs.
        ValueError: no parameters, a frozen one, or two of one name.
        NotImplementedError: a complex parameter; a layout or wrapper that is not supported.
    """
    shard_reader = reader.ShardReader()
    scored: dict[Hashable, Part] = {}
    for position, pair in enumerate(parameters):
        module, name = checked_pair(pair, f"parameters[{position}]")
        label = label_of(pair, position)
        key = getattr(pair, "fqn", None) or f"parameters[{len(scored)}]"
        shard = shard_reader.read(module, name, label)
        if shard.values.is_complex():
            text = f"{label}: dtype {shard.values.dtype} is complex; expected a real parameter."
            raise NotImplementedError(text)
        reader.check_trainable(shard)
        scored.setdefault(shard.key, Part(pair, label, key, shard))
    if not scored:
        raise ValueError("parameters is empty; expected at least one (module, name) pair.")
    counts = Counter(part.key for part in scored.values())
    (key, count), *_ = counts.most_common(1)
    if count > 1:
        raise ValueError(f"{key} is the name of two parameters; expected unique names.")
    return tuple(scored.values())


Unit = Literal["global_batch", "rank_batch"]
NonFinite = Literal["refuse", "skip"]


class Criterion:
    """Base of all criteria: accumulates scores of single elements, one unit after the other.

    A *unit* is what one gradient is of. ``"global_batch"``: the averaged gradient that a step of
    the optimizer sees. ``"rank_batch"``: the gradient of one rank's own batch, before it is
    averaged.

    Of global batches: one call of :meth:`update` for each step; under gradient accumulation after
    the last backward, when ``.grad`` has the whole step. With a gradient scaler call it after
    ``scaler.unscale_(optimizer)`` (or pass ``weight=1 / scaler.get_scale()``), and before gradients
    are clipped: a factor that changes from step to step changes the sum. Where ranks have unequal
    numbers of tokens, weight the *loss* (on rank r ``loss * tokens_r * num_ranks / tokens``), and
    ``.grad`` is the mean over all tokens.

    [Note: no gradient] Scores that multiply the weight with what was seen of its gradient are all 0
    in a matrix that no gradient reached, such as an expert without tokens: it would lose its first
    elements, or all. They are |weight| times the typical score per magnitude of its siblings
    instead: the same as for statistics, see files.statistics_file.[Note: empty].

    Subclasses define :meth:`_accumulate`, and :meth:`_score` unless the scores are what was
    accumulated.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; a tied parameter counts once.
            Wrap the model first.
        group: the ranks that take part; every rank by default.
        non_finite: what to do with a gradient that is infinite or NaN, as gradient scalers produce
            them. "refuse": it makes ``scores()`` raise, on every rank. "skip": ``update`` leaves
            out the whole unit, on every rank, if any rank has such a value; it is collective then,
            and costs an all-reduce of 16 bytes and a pass over the gradients.

    Attributes:
        pruning_method: the class that prunes by these scores: ``L1Unstructured``, or
            ``LowestScore`` where they are signed.
        num_updates: units so far.
        total_weight: the sum of their weights.
        num_skipped: units that were left out.

    Raises:
        TypeError: no (module, name) pairs.
        ValueError: no parameters, or a frozen one.
        NotImplementedError: a complex parameter; a layout or wrapper that is not supported.
    """

    pruning_method: ClassVar[type[BasePruningMethod]] = L1Unstructured
    _power: Power = 1  # of the gradients that are added up
    _multiplies_weights: ClassVar[bool] = False  # see [Note: no gradient]
    _sums: Any = None

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        group: ProcessGroup | None = None,
        non_finite: NonFinite = "refuse",
    ) -> None:
        if non_finite not in ("refuse", "skip"):
            raise ValueError(f"non_finite={non_finite!r}; expected 'refuse' or 'skip'.")
        self._non_finite = non_finite
        self._group = group
        self._is_calibrating = False
        self._scored = scored_parameters(parameters)
        self.reset()

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs that have scores, each parameter once."""
        return [part.pair for part in self._scored]

    def update(self, weight: float = 1.0) -> None:
        """Add one unit: call it after its backward, before zero_grad and the optimizer's step.

        Local: it communicates nothing, and an error is raised on the rank where it occurs.

        Args:
            weight: of the unit, >= 0: its gradient counts ``weight`` times.

        Raises:
            ValueError: a weight that is no finite number >= 0; a parameter that was frozen.
            RuntimeError: a parameter without a gradient, or with one that is not reduced yet.
                Nothing has changed then.

        If it is interrupted while it adds, ``scores()`` raises until :meth:`reset`.
        """
        self._add_unit(checked_unit(weight)[0])

    def _add_unit(self, weight: float, loss_scale: float = 1.0) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if self._non_finite == "skip":
                ranks = world(self._group)
                own = ranks.run(lambda: list(map(is_finite, self._gradients(self._parts()))))
                if int(ranks.max(torch.tensor([int(not all(own))]))):
                    self.num_skipped += 1
                    return
            self._check_complete()
            parts = self._parts()
            units = self._prepared(parts, self._gradients(parts), weight)
            self._is_incomplete = True
            for part, unit in zip(parts, units, strict=True):
                self._accumulate(part, unit, weight / loss_scale**self._power)
        for part in parts:
            part.weight += weight
        self.num_updates += 1
        self.total_weight += weight
        self._is_incomplete = False

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Collect units of a calibration: inside, each :meth:`batch` drops its gradients.

        So a loop needs no ``zero_grad``, and no batch counts twice. Collective over ``group`` when
        it begins. Gradients of parameters that the criterion does not score stay; FSDP1 drops
        those of a whole flat parameter. ::

            with criterion.calibrating():
                for batch in loader:
                    with criterion.batch():
                        loss(model, batch).backward()

        Raises:
            RuntimeError: a parameter has a gradient already, or this is inside of itself; on every
                rank.
            Exception: of the code inside. The other ranks raise it in their next call of this
                library, for which the rank that failed waits.

        Cost: one all-reduce of 40 bytes.
        """
        communicator = world(self._group)
        communicator.run(self._check_before_calibrating)
        self._is_calibrating = True
        try:
            with communicator.raising_everywhere():
                yield
        finally:
            self._is_calibrating = False

    @contextmanager
    def batch(self, weight: float = 1.0) -> Iterator[None]:
        """One unit: the backward passes inside, then :meth:`update`; nothing after an error.

        Outside of :meth:`calibrating` the gradients stay, for the optimizer's step.
        """
        with self._dropping_gradients():
            yield
            self.update(weight)

    @contextmanager
    def _dropping_gradients(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._is_calibrating:
                for part in self._parts():
                    reader.drop_gradient(part.shard)

    def scores(self) -> dict[tuple[nn.Module, str], Tensor]:
        """The scores as ``importance_scores`` takes them, fp32, laid out like the parameters.

        Collective over ``group``.

        Returns:
            By (module, name): a DTensor like the parameter; under FSDP1 this rank's run of it,
            1-d; else a plain tensor. New tensors. A warning names matrices that no gradient
            reached; see [Note: no gradient].

        Raises:
            ValueError: no unit yet; ranks with different numbers of units; a score that is not
                finite. On every rank.
            RuntimeError: an error ended what added units up, on any rank; on every rank.

        Cost: 4 bytes of memory per element of this rank's shards; all-reduces of 40 and of 8 bytes;
        where no gradient reached a matrix, a pass over scores and weights, and about 100 bytes per
        parameter on the wire.
        """
        with torch.inference_mode(False), torch.no_grad():
            scored, is_empty = world(self._group).run(
                self._checked_scores,
                lambda _: [
                    ("criterion", type(self).__name__),
                    ("number of updates", str(self.num_updates)),
                    ("weight of all updates", repr(self.total_weight)),
                ],
            )
            if self._multiplies_weights:
                score_as_siblings(scored, is_empty, self._group)
        is_signed = not self.pruning_method.IGNORES_SIGN
        scores: dict[tuple[nn.Module, str], Tensor] = SignedScores[Tensor]() if is_signed else {}
        for part, score in scored:
            scores[part.pair] = part.shard.as_parameter_layout(score)
        return scores

    def reset(self) -> None:
        """Forget all units, and the error that ended a calibration.

        Raises:
            RuntimeError: inside of ``calibrating``, with ``unit="rank_batch"``.
        """
        check_between(self)
        for part in self._scored:
            part.reset()
        self.num_updates = 0
        self.num_skipped = 0
        self.total_weight = 0.0
        self._is_incomplete = False  # a part of a unit, or of a calibration, was added

    def state_dict(self) -> dict[str, Any]:
        """What was accumulated, for torch.distributed.checkpoint (DCP) or ``torch.save``.

        Collective over ``group``. Tensors are references, sharded as the parameters are. DCP saves
        them and, in place, loads them on any other sharding; under FSDP1 and ZeRO-3 on the same
        one only: each rank's run has a key of its own. :meth:`load_state_dict` takes what it
        loaded.

        Raises:
            NotImplementedError: a shard that DCP of this torch would misplace (``check_writable``);
                by name, on every rank.
            RuntimeError: as :meth:`scores`.

        Cost: memory for accumulators if there was no unit yet; one all-reduce of 40 bytes.
        """

        def to_save() -> dict[str, Tensor | dict[str, Tensor]]:
            self._check_complete()
            return {part.key: part.to_save() for part in self._parts()}

        with torch.inference_mode(False), torch.no_grad():
            tensors = world(self._group).run(to_save)
        return {
            "criterion": self._kind,
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "total_weight": self.total_weight,
            # As text: DCP of some versions of torch takes a dict of floats apart, and some do not.
            "weights": json.dumps({part.key: part.weight for part in self._scored}),
            "accumulators": tensors,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that :meth:`state_dict` returned. Collective over ``group``.

        Raises:
            ValueError: a state of another criterion, of other parameters, or of another layout; on
                every rank, and nothing has changed then.
            RuntimeError: inside of ``calibrating``, with ``unit="rank_batch"``.

        Cost: no memory but that of the accumulators; one all-reduce of 40 bytes.
        """

        def checked() -> list[Callable[[], object]]:
            check_between(self)
            self._check_state(state)
            tensors = state["accumulators"]
            return [part.loader(tensors[part.key]) for part in self._parts()]

        with torch.inference_mode(False), torch.no_grad():
            for load in world(self._group).run(checked):
                load()
        weights = json.loads(state["weights"])
        for part in self._scored:
            part.weight = float(weights[part.key])
        self.num_updates, self.num_skipped = int(state["num_updates"]), int(state["num_skipped"])
        self.total_weight = float(state["total_weight"])
        self._is_incomplete = False

    @property
    def _kind(self) -> str:
        """What is accumulated: sums of another kind are no use."""
        return type(self).__name__

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for a state of another criterion, or of other parameters."""
        if state.get("criterion") != self._kind:
            found = state.get("criterion")
            raise ValueError(f"the state is of the criterion {found!r}; expected {self._kind!r}.")
        keys, found = {part.key for part in self._scored}, set(state["accumulators"])
        if found != keys:
            missing, unknown = sorted(keys - found), sorted(found - keys)
            raise ValueError(
                f"the state has nothing of {missing}, and has {unknown}, which are none of the "
                "criterion's parameters; expected the same parameters."
            )

    def _prepared(
        self, parts: Sequence[Part], gradients: list[Tensor], weight: float
    ) -> list[Tensor]:
        """What :meth:`_accumulate` adds of each parameter, before anything has changed.

        What may fail belongs here. By default the gradients.
        """
        return gradients

    def _accumulate(self, part: Part, gradient: Tensor, factor: float) -> None:
        """Add a unit of one parameter, in place.

        Args:
            part: this rank's part of the parameter.
            gradient: of the shape of its values, of any dtype; not to be changed. Or what
                :meth:`_prepared` made of it.
            factor: what the unit, or its power, is multiplied with.
        """
        raise NotImplementedError

    def _score(self, part: Part) -> Tensor:
        """The scores of this rank's part of a parameter: a new fp32 tensor like its values."""
        return part.total.clone()

    def _parts(self) -> list[Part]:
        """This rank's part of every parameter, as it is now."""
        communicator = world(self._group)
        shard_reader = reader.ShardReader(communicator.index, communicator.size)
        return [part.read(shard_reader) for part in self._scored]

    def _gradients(self, parts: Sequence[Part]) -> list[Tensor]:
        """This rank's part of every gradient; all are checked before any is used."""
        for part in parts:
            part.check()
        return [reader.local_gradient(part.shard) for part in parts]

    def _check_before_calibrating(self) -> None:
        if self._is_calibrating:
            raise RuntimeError("calibrating() inside of calibrating(); expected one at a time.")
        for part in self._parts():
            gradient = reader.available_gradient(part.shard)
            if gradient is not None and gradient is not part.shard.values:
                raise RuntimeError(
                    f"{part.label} has a gradient already, which would count with the first "
                    "batch; expected none. Call model.zero_grad() before calibrating()."
                )

    def _check_complete(self) -> None:
        """Refuse accumulators that have a part of a unit, or not all units of a calibration."""
        check_between(self)
        if self._is_incomplete:
            raise RuntimeError(
                f"a calibration or an update of this {type(self).__name__} ended with an error "
                "after a part of it had been added up; expected reset(), and all units again."
            )

    def _checked_scores(self) -> tuple[list[tuple[Part, Tensor]], bool]:
        """The scores of this rank's parts, and whether all that it has of a matrix are 0."""
        self._check_complete()
        if not self.num_updates:
            raise ValueError(f"{type(self).__name__} has seen no unit; call update() before.")
        scored, is_empty = [], False
        for part in self._parts():
            score = self._score(part)
            extremes = extremes_of(score)
            if not all(map(math.isfinite, extremes)):
                text = f"{part.label} has a score that is not finite, after {self.num_updates} "
                raise ValueError(text + "updates; expected finite gradients, or non_finite='skip'.")
            scored.append((part, score))
            is_empty |= extremes == [0.0, 0.0]
            if part.num_matrices > 1 and self._multiplies_weights:
                is_empty |= bool((part.sums(score)[part.matrices(score)[1]] == 0).any())
        return scored, is_empty


def extremes_of(tensor: Tensor) -> list[float]:
    """The lowest and the highest element, NaN if one is; none of none. One read."""
    return torch.stack(tensor.aminmax()).tolist() if tensor.numel() else []


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or NaN. One read, without temporaries."""
    return all(map(math.isfinite, extremes_of(tensor)))


def score_as_siblings(
    scored: Sequence[tuple[Part, Tensor]], is_needed: bool, group: ProcessGroup | None
) -> None:
    """Score matrices that no gradient reached; see base.[Note: no gradient]. Collective.

    Args:
        scored: this rank's parts, and their scores, which are changed.
        is_needed: whether this rank's part of a matrix has no score but 0.
        group: the ranks that score.
    """
    ranks = reader.ranks_with_shards([part.shard for part, _ in scored], group)
    if not int(ranks.max(torch.tensor([int(is_needed)]))):
        return
    magnitudes = [part.shard.live_values().abs().float() for part, _ in scored]
    texts, _ = ranks.distinct_texts(json.dumps({p.label: p.num_matrices for p, _ in scored}))
    sizes: dict[str, int] = {label: n for text in texts for label, n in json.loads(text).items()}

    def sums() -> Tensor:
        """Of scores and of magnitudes, by parameter and matrix; replicas add to both alike."""
        total = {label: torch.zeros(2, n, dtype=torch.float64) for label, n in sizes.items()}
        for (part, score), magnitude in zip(scored, magnitudes, strict=True):
            total[part.label] += torch.stack([part.sums(score), part.sums(magnitude)])
        return torch.cat([*total.values()], 1).view(-1)

    pairs = ranks.reduce_floats(2 * sum(sizes.values()), sums).view(2, -1).T.tolist()
    each = iter([((0.0, s / m) if s else None) if m else () for s, m in pairs])
    typical = {label: [*itertools.islice(each, n)] for label, n in sizes.items()}
    means, warning = means_of_siblings(typical, of_gradients=True)
    if warning is not None and ranks.index == 0:
        warnings.warn(warning, stacklevel=3)
    for (part, score), magnitude in zip(scored, magnitudes, strict=True):
        if part.label in means:
            empty, (_, ratio) = means[part.label]
            rows, numbers = part.matrices(score)
            is_empty = torch.isin(numbers, torch.tensor(empty)).to(rows.device)
            rows[is_empty] = part.matrices(magnitude)[0][is_empty] * ratio
