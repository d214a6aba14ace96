"""Pruning in rounds: each prunes some more, by scores of the model that the rounds before left.

States of the model after the rounds, in folders, let a killed run go on from there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from distprune import checkpoint
from distprune._common.naming import NamedParameter, Pair
from distprune._common.process_groups import world
from distprune._common.pruned_form import mask_key, orig_key
from distprune.api.global_unstructured import global_unstructured
from distprune.call.report import PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.language_models.calibrating import calibrate
from distprune.language_models.running import Report
from distprune.language_models.text import TokenWindows
from distprune.methods.builtin import L1Unstructured
from distprune.reconstruction.reconstructing import ReconstructionReport, reconstruct
from distprune.shards.parameters import Scores
from distprune.statistics.gram import GramMatrices

# Begins the keys of a state that has some parameters only.
_PART = "part."


@dataclass(frozen=True)
class Round:
    """What one round did; the same on every rank.

    Attributes:
        number: from 0 on.
        sparsity: over all parameters, as it was asked for.
        pruning: of this round.
        update: of the kept weights after it; None without.
    """

    number: int
    sparsity: float
    pruning: PruningReport
    update: ReconstructionReport | None


def prune_in_rounds(
    model: nn.Module,
    windows: TokenWindows,
    parameters: Iterable[Pair],
    sparsities: Sequence[float],
    score: Callable[[], Scores],
    *,
    update: bool = True,
    damping: float = 0.01,
    batch_size: int = 1,
    progress: Report | None = None,
    finished: int = 0,
) -> Iterator[Round]:
    """Prune globally in rounds, and after each move the kept weights. Collective.

    def score():
        taylor = criteria.Taylor(parameters, unit="rank_batch", power=1)
        calibrate(model, windows, taylor)
        return taylor.scores()

    for made in prune_in_rounds(model, windows, parameters, [0.35, 0.5, 0.6], score):
        print(made.pruning.sparsity)  # KeptStates saves the model here, to go on after a stop

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

    Raises:
        ValueError: sparsities that do not rise between 0 and 1, or below the present one.
        Exception: as ``global_unstructured``, :func:`calibrate` and ``reconstruct``, on every
            rank. Rounds before stay.

    Cost: per round that of the scores, one forward of each window, and that of ``reconstruct``.
    """
    pairs = list(parameters)
    communicator = world()

    def check() -> None:
        steps = [0.0, *sparsities]
        if not sparsities or steps != sorted(set(steps)) or steps[-1] >= 1:
            raise ValueError(
                f"sparsities={list(sparsities)!r}; expected rising ones between 0 and 1, such as "
                "[0.35, 0.5, 0.6]."
            )

    facts = [("sparsities", repr(list(sparsities))), ("finished", repr(finished))]
    with communicator.exclusively():
        communicator.run(check, lambda _: facts)
    arguments = ParameterArguments(parameters=pairs)
    for number, sparsity in list(enumerate(sparsities))[finished:]:
        entries = count_live(lambda: arguments, communicator).entries()
        total = sum(entry.num_elements for entry in entries)
        num_pruned = sum(entry.num_pruned for entry in entries)
        amount = round(sparsity * total) - num_pruned
        if amount < 0:
            raise ValueError(
                f"sparsities[{number}]={sparsity!r}, and {num_pruned / total:.2%} are pruned "
                "already; expected more."
            )
        scores = score()
        grams = GramMatrices(pairs, allow_empty="*") if update else None
        if grams is not None:
            calibrate(model, windows, grams, batch_size=batch_size, progress=progress)
        pruning = global_unstructured(pairs, L1Unstructured, scores, amount=amount)
        moved = None if grams is None else reconstruct(pairs, grams, damping=damping)
        yield Round(number, sparsity, pruning, moved)


class KeptStates:
    """Weights and masks of a model after each of some steps. Collective: every rank calls alike.

    kept = KeptStates(model, "work/rounds")
    finished = kept.finished(len(sparsities))
    if finished:
        kept.load(finished - 1)
    for made in prune_in_rounds(model, windows, parameters, sparsities, score, finished=finished):
        kept.save(made.number)

    A state is there as a whole or not at all. It is a checkpoint of torch.distributed.checkpoint,
    which any number of ranks can load on any sharding.

    Args:
        model: plain or wrapped.
        folder: gets a folder for each step; every rank sees it.
        name: of the folder of a step, by its number.
    """

    def __init__(
        self, model: nn.Module, folder: str | Path, name: Callable[[int], str] = "step-{}".format
    ) -> None:
        self._model = model
        self._folder = Path(folder)
        self._name = name
        self._communicator = world()

    def finished(self, total: int) -> int:
        """The number of steps up to the last one, of so many, whose state is there."""

        def find() -> torch.Tensor:
            there = [number + 1 for number in range(total) if self._path(number).exists()]
            return torch.tensor([max(there, default=0)])

        return int(self._communicator.leader_of(1, find)[0])

    def load(self, number: int) -> None:
        """Give the model the state after a step, or of it what was kept.

        Raises: as ``checkpoint.load``, and as ``torch.distributed.checkpoint.load``.
        """
        from torch.distributed.checkpoint import state_dict_loader
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            set_model_state_dict,
        )

        path = self._path(number)
        stored = self._communicator.run(
            lambda: list(FileSystemReader(path).read_metadata().state_dict_metadata)
        )
        keys = {key.removeprefix(_PART) for key in stored if key.startswith(_PART)}
        if not keys:
            checkpoint.load(path, self._model)
            return
        checkpoint.prepare_for_load(self._model, keys)
        with self._communicator.raising_everywhere():
            state = {k: v for k, v in get_model_state_dict(self._model).items() if k in keys}
            state_dict_loader.load(
                {_PART + key: value for key, value in state.items()}, checkpoint_id=path
            )
            options = StateDictOptions(strict=False)
            set_model_state_dict(self._model, state, options=options)
        self._communicator.agree()

    def save(self, number: int, parameters: Iterable[NamedParameter] | None = None) -> None:
        """Keep the present state as that after a step.

        Args:
            parameters: pruned ones that are all that this step has changed; None: any may have
                changed.

        Raises:
            Exception: as ``torch.distributed.checkpoint.save``.

        Cost: writes the shards of this rank.
        """
        from torch.distributed.checkpoint import state_dict_saver
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        path = self._path(number)
        partial = path.with_name(f"{path.name}.partial")
        is_first = self._communicator.index == 0
        self._remove(partial)  # of a run that was killed here
        with self._communicator.raising_everywhere():
            if parameters is None:
                state = checkpoint.get_state_dict(self._model)
            else:
                names = {key(p.fqn) for p in parameters for key in (orig_key, mask_key)}
                every = get_model_state_dict(self._model)
                state = {_PART + key: value for key, value in every.items() if key in names}
            state_dict_saver.save(state, checkpoint_id=partial)
        self._communicator.agree()
        self._communicator.run(lambda: partial.rename(path) if is_first else None)

    def remove(self, number: int) -> None:
        """Remove the state of a step, if it is there."""
        self._remove(self._path(number))

    def _remove(self, path: Path) -> None:
        is_first = self._communicator.index == 0
        self._communicator.run(
            lambda: shutil.rmtree(path, ignore_errors=True) if is_first else None
        )

    def _path(self, number: int) -> Path:
        return self._folder / self._name(number)
