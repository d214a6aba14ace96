"""The decoder layers that a run has pruned and updated: each in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from distprune import checkpoint
from jobs.ranking import Pairs
from jobs.work import Folder


class FinishedBlocks:
    """Weights and masks of finished decoder layers. Collective.

    Args:
        model: whose layers they are.
        work: where they are kept.
    """

    def __init__(self, model: nn.Module, work: Folder) -> None:
        self._model, self._work = model, work

    def load(self) -> list[list[dict[str, Any]]]:
        """Give the model what is there; the rows of the report of each layer that is."""
        rows: list[list[dict[str, Any]]] = []
        while self._work.job.of_rank_0(self._folder(len(rows)).exists):
            self._load(self._folder(len(rows)))
            rows.append(self._work.once(f"block-{len(rows)}.json", list))
        return rows

    def save(self, number: int, parameters: Pairs, rows: list[dict[str, Any]]) -> None:
        """Keep a layer that is done."""
        self._work.once(f"block-{number}.json", lambda: rows)
        names = {f"{pair.fqn}_{part}" for pair in parameters for part in ("orig", "mask")}

        def write(folder: Path) -> None:
            state = get_model_state_dict(self._model)
            dcp.save({k: v for k, v in state.items() if k in names}, checkpoint_id=folder)

        self._work.once_folder(self._folder(number).name, write)

    def _folder(self, number: int) -> Path:
        return self._work.path / f"block-{number}"

    def _load(self, folder: Path) -> None:
        keys = list(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
        checkpoint.prepare_for_load(self._model, keys)
        state = {k: v for k, v in get_model_state_dict(self._model).items() if k in keys}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self._model, state, options=StateDictOptions(strict=False))
