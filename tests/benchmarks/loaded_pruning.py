"""Load a language model onto ranks and prune it: the memory of both together.

Called by the part "loading". Each case runs in processes of its own: what an earlier one has left
could be used again, and would not be seen.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from gloo_ranks import on_gloo_ranks
from measuring import Bound, CheckFailed, Table, Verdict, measured
from torch.distributed.tensor import DTensor

FACTOR = 1.3  # of shard + largest layer + masks of one byte per element
AMOUNT = 0.5
CASES = ("magnitude, global, rms", "Wanda, rows", "Wanda, global, rms")


def empty_table(num_ranks: int) -> Table:
    return Table(
        f"load it and prune {AMOUNT:.0%} of its linear layers, on {num_ranks} ranks: the largest "
        "of all ranks",
        ["", "shard MB", "layer MB", "masks MB", "peak MB", "peak / (shard + layer + masks)",
         "left MB", "seconds"],
        [],
        notes=[
            "masks: one byte per local element of what is pruned. peak: what loading and pruning "
            "add to the resident set of a process that has done both with a tiny model, "
            "the shard and the masks in it; left: what stays of it."
        ],
    )  # fmt: skip


def add_rows(
    table: Table,
    folder: str,
    tiny: str,
    wrap: str,
    dtype: str,
    num_ranks: int,
) -> None:
    """Measure every case, and add a row and a bound for each."""
    with tempfile.TemporaryDirectory() as temporary:
        files = [str(Path(temporary, name)) for name in ("statistics", "tiny")]
        for model, file in zip((folder, tiny), files, strict=True):
            write_statistics_of(model, file)
        for case in CASES:
            found = on_gloo_ranks(
                prune_on_rank, num_ranks, (folder, files[0]), (tiny, files[1]), wrap, case
            )
            row = [max(values) for values in zip(*found, strict=True)]
            label = f"{case}, {wrap} {dtype}"
            table.rows.append([label, *row])
            text = f"peak / (shard + largest layer + masks) of loading and pruning, {label}"
            table.verdicts.append(Verdict(Bound(text, FACTOR), row[4]))


def write_statistics_of(model: str, file: str) -> None:
    """Statistics of activations for each linear layer of a decoder: random numbers."""
    import numpy as np

    from distprune.files.checkpoints.checkpoint import open_checkpoint
    from distprune.files.checkpoints.statistics_file import (
        StoredStatistics,
        WeightLayout,
        write_statistics,
    )

    random = np.random.default_rng(0)
    stored = {}
    for entry in open_checkpoint(model).tensors:
        if len(entry.shape) == 2 and "layers" in entry.name:
            values = random.random((2, entry.shape[1]))
            stored[entry.name] = StoredStatistics(
                WeightLayout("linear", entry.shape), 1000, *values
            )
    write_statistics(file, "one_pass", stored)


def prune_on_rank(
    given: tuple[str, str], tiny: tuple[str, str], wrap: Any, case: str
) -> list[float]:
    """Figures of one rank, in the order of the columns.

    Args:
        given: folder of the model, and file of its statistics.
        tiny: the same of a model for a first round, so that imports and connections are no cost.
        wrap: of :func:`distprune.language_models.load_sharded`.
        case: one of CASES.
    """
    load_and_prune(*tiny, wrap, case)
    gc.freeze()
    kept: list[Any] = []
    both = measured(lambda: kept.append(load_and_prune(*given, wrap, case)))
    model, report = kept[0]
    num_elements = sum(entry.num_elements for entry in report.parameters)
    if report.num_pruned != round(AMOUNT * num_elements):
        raise CheckFailed(f"{case}: {report.num_pruned} of {num_elements} elements are pruned")
    parameters = [(name, local(p)) for name, p in model.named_parameters()]
    shard = sum(p.nbytes for _, p in parameters)
    masks = sum(p.numel() for name, p in parameters if name.endswith("_orig"))  # of one byte
    layer = sum(p.numel() * p.itemsize for p in model.model.layers[0].parameters())
    ratio = both.peak_extra_bytes / (shard + layer + masks)
    sizes = (shard, layer, masks, both.peak_extra_bytes)
    left = both.retained_bytes / 1e6
    return [*(size / 1e6 for size in sizes), ratio, left, both.seconds]


def load_and_prune(folder: str, statistics: str, wrap: Any, case: str) -> tuple[Any, Any]:
    import distprune as prune
    from distprune.language_models import load_sharded

    model = load_sharded(folder, wrap=wrap)
    linear = prune.select(model, types=torch.nn.Linear, exclude="lm_head")
    scores = None
    if case.startswith("Wanda"):
        scores = prune.statistics.ActivationStatistics.load(statistics, linear).wanda()
    options: dict[str, Any] = {"normalize": "rms"} if "rms" in case else {"scope": "row"}
    report = prune.global_unstructured(
        linear, prune.L1Unstructured, scores, amount=AMOUNT, **options
    )
    return model, report


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
