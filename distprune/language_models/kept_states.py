"""States of a model after the steps of a pruning, in folders: a killed run goes on from there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from distprune import checkpoint
from distprune._common.naming import NamedParameter
from distprune._common.process_groups import world
from distprune._common.pruned_form import mask_key, orig_key

# Begins the keys of a state that has some parameters only.
_PART = "part."


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
