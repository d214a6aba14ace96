"""The prunings of a comparison in a single process: `python -m tiny_llama.lone_comparison PLAN`.

As in `lone_pruning.py` there is no wrapper, no DTensor and no other process. The trained weights
and the scores are the job's (sums over ranks round differently from those of one process); which
elements are pruned by them is decided here, on plain tensors.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import distprune as prune
from jobs.processes import be_group_of_one, quit_group
from jobs.scopes import keywords_of

from .model import build_model
from .score_files import ComparisonFiles


def main(plan_file: Path) -> None:
    """Follow the plan that the job wrote, and save all masks, named `{cell}/{parameter}`."""
    plan = json.loads(plan_file.read_text())
    files = ComparisonFiles(plan_file.parent)
    trained, ratios = files.load_trained(), files.load_ratios()

    model = build_model()
    parameters = prune.select(model, exclude=plan["exclude"])

    def masks_of(cell: dict[str, object]) -> dict[str, Tensor]:
        model.load_state_dict(trained)
        ranking = files.load_ranking(cell["criterion"], parameters)
        torch.manual_seed(plan["seed"])
        prune.global_unstructured(
            parameters,
            ranking.method,
            ranking.scores,
            amount=cell["amount"],
            **keywords_of(cell["scope"], ratios),
        )
        masks = {}
        for pair in parameters:
            module, name = pair
            masks[f"{cell['key']}/{pair.fqn}"] = getattr(module, f"{name}_mask").bool()
            prune.remove(module, name)
        return masks

    warnings.simplefilter("ignore", UserWarning)  # of emptied layers: see comparison.py
    masks: dict[str, Tensor] = {}
    for cell in (cell for cell in plan["cells"] if cell["criterion"] != "random"):
        masks |= masks_of(cell)
    # As in lone_pruning.py: only a group makes random numbers a function of seed and index.
    be_group_of_one("gloo")
    for cell in (cell for cell in plan["cells"] if cell["criterion"] == "random"):
        masks |= masks_of(cell)
    save_file(masks, plan_file.parent / plan["masks_file"])
    quit_group(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
