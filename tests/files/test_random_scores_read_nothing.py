"""Random scores do not depend on what is stored: ranking by them reads no bytes of the tensors."""

import os

import numpy as np
import torch

from distprune.files import planning
from distprune.files.formats.header import read_header
from distprune.files.ranking import columns
from distprune.files.ranking.columns import ColumnCuts
from distprune.files.ranking.groups import groups_of
from distprune.files.ranking.streaming import Source
from distprune.files.recipe import FileRecipe
from helpers import file_oracle, tiny_checkpoints


def test_columns_are_cut_without_reading_them(tmp_path, monkeypatch):
    """The weights are cut off the file: any read of them would fail."""
    monkeypatch.setattr(columns, "CHUNK", 24)
    monkeypatch.setattr(columns, "MAX_IN_MEMORY", 12)
    name = "h.0.mlp.c_fc.weight"
    weight = torch.ones(24, 32)
    source = tiny_checkpoints.save(
        tmp_path / "source", {name: weight}, config={"model_type": "gpt2"}
    )
    plan = planning.plan(source, FileRecipe(0.4, "row", score="random", seed=3))
    groups = groups_of(plan.tensors[0], plan.recipe_of(0))
    assert columns.is_too_large(groups)
    path = source / "model.safetensors"
    os.truncate(path, min(entry.start for entry in read_header(path).tensors))

    reader = Source(plan)
    cuts = ColumnCuts(reader, 0, 0, groups)
    for _ in cuts.find():
        pass
    keys = reader.read_keys(0, 0, weight.numel())
    pruned = [cuts.lowest(part) for part in np.split(keys, range(cuts.step, len(keys), cuts.step))]
    reader.close()

    scores = file_oracle._scores({name: weight}, [name], 3)[name]
    keep = file_oracle.masks({name: scores.T}, [name], sparsity=0.4, scope="row")[name].T
    assert np.array_equal(np.concatenate(pruned), ~keep.flatten().numpy())
