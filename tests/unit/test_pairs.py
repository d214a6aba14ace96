"""(module, name) pairs: every function refuses what is none, and gives a parameter one label."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune import criteria, dynamic, schedule
from helpers.models import Net, seeded

TAKES_PAIRS = {
    "global_unstructured": lambda pairs: prune.global_unstructured(
        pairs, prune.L1Unstructured, amount=0.5
    ),
    "get_masks": prune.get_masks,
    "set_masks": lambda pairs: prune.set_masks(pairs, [torch.ones(3)] * len(pairs)),
    "criteria": lambda pairs: criteria.Taylor(pairs, unit="global_batch"),
    "dense_gradients": lambda pairs: prune.dense_gradients(pairs).__enter__(),
    "rigl_step": lambda pairs: dynamic.rigl_step(pairs, 0.1),
    "ScheduledPruner": lambda pairs: schedule.ScheduledPruner(pairs, schedule.OneShot(0, 0.5)),
    "verify": lambda pairs: prune.verify(Net(), expected=pairs),
    "global_mask": lambda pairs: prune.global_mask(pairs, 3),
}


@pytest.mark.parametrize("name", TAKES_PAIRS)
@pytest.mark.parametrize(
    ("wrong", "found"),
    [(nn.Linear(2, 2), "is a Linear; expected"), (("l1", 3), "is a pair of str and int; expected")],
)
def test_what_is_no_pair_is_refused_by_its_place_in_the_list(name, wrong, found):
    model = seeded(Net())
    with pytest.raises(TypeError, match=r"\[1\]\)? " + found):
        TAKES_PAIRS[name]([prune.select(model)[0], wrong])
    assert not prune.is_pruned(model)


def test_a_schedule_has_the_labels_of_all_other_functions():
    layer = nn.Linear(4, 4)
    pruner = schedule.ScheduledPruner(
        [(layer, "weight")],
        schedule=schedule.OneShot(0, 0.5),
        max_sparsity={(layer, "weight"): 0.5},
    )
    assert pruner.state_dict()["parameters"] == ["Linear.weight (#0)"]
