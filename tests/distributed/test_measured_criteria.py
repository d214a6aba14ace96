"""Rounds of SynFlow on every wrapper have the masks of one process; what GraSP and SynFlow refuse.

Their scores, and that they leave the model as it was, are part of the matrix of criteria.
"""

import pytest
import torch
from torch import nn

from distprune import criteria
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import criterion_references as references
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, wrong_masks
from helpers.sampling import every

# DDP multiplies by 1/3, which is no float: there scores equal only to rounding.
EXACT = [w for w in wrappings.sampled(wrappings.TRAINED) if w != "ddp-3"]


def differences_of_rounds(wrapping: str) -> list[str]:
    model = runs.integer_net(wrapping)
    indices = wrappings.local_indices(model, wrapping)
    ones = torch.ones(1, model.l1.in_features)
    masks = references.synflow_masks(model, runs.WEIGHTS, ones, 0.8, 4)
    model = wrappings.wrap(model, wrapping)
    criterion = criteria.SynFlow(runs.named_targets(model, runs.WEIGHTS), model=model)
    report = criterion.prune(lambda: model(ones), 0.8, rounds=4)
    wrong = wrong_masks(model, masks, indices)
    if report.num_pruned != round(0.8 * report.num_elements):
        wrong.append(f"{report.num_pruned} are pruned of {report.num_elements}")
    return wrong


@pytest.mark.parametrize("wrapping", every(2, EXACT))
def test_rounds_of_synflow(wrapping):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences_of_rounds, size, wrapping))


def messages_of_mixed_precision(wrapping: str, kind: str) -> str:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    policy = (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        if wrapping.startswith("fsdp2")
        else {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    )
    model: nn.Module = wrappings.wrap(runs.integer_net(wrapping), wrapping, **policy)
    try:
        getattr(criteria, kind)(runs.named_targets(model, runs.WEIGHTS), model=model)
    except NotImplementedError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("kind", ["GraSP", "SynFlow"])
@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp2-2"])
def test_mixed_precision_is_refused_by_name(wrapping, kind):
    for message in run_ranks(messages_of_mixed_precision, 2, wrapping, kind):
        assert message.startswith(f"l1.weight: {kind} needs a model that computes in float32")
        assert "gathered in another dtype" in message
