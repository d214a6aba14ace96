"""GraSP and SynFlow on every wrapper: bit for bit those of one process, where sums are exact."""

import pytest
import torch
from torch import Tensor, nn

from distprune import criteria
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import criterion_references as references
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, changes, snapshot, wrong_masks


class Chain(runs.IntegerNet):
    """Linear layers only: the gradient is of degree 2 in the weights, and the difference exact."""

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(self.l2(self.l1(x)))


def chain(wrapping: str) -> Chain:
    model = Chain(wrappings.runnable_sizes(wrapping))
    model.load_state_dict(runs.integer_net(wrapping).state_dict())
    return model.double()


def doubled(batches: list) -> list:
    return [tuple(tensor.double() for tensor in batch) for batch in batches]


def differences_of_grasp(wrapping: str) -> list[str]:
    model = chain(wrapping)
    indices = wrappings.local_indices(model, wrapping)
    batches = doubled(runs.batches(model, 3))
    losses = [lambda m, batch=batch: runs.loss(m, *batch) for batch in batches]
    expected = {
        name: score.float() for name, score in references.grasp(model, runs.WEIGHTS, losses).items()
    }
    model = wrappings.wrap(model, wrapping)

    def backward() -> None:
        for batch in batches:
            runs.backward(model, batch, *wrappings.data_rank(wrapping))

    criterion = criteria.GraSP(runs.named_targets(model, runs.WEIGHTS), model=model, step=2.0**-6)
    backward()  # FSDP adds attributes in the first forward
    model.zero_grad()
    before = snapshot(model)
    criterion.measure(backward)
    wrong = changes(before, snapshot(model))
    return wrong + runs.differing(criterion.scores(), expected, indices)


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_grasp(wrapping):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences_of_grasp, size, wrapping))


def differences_of_synflow(wrapping: str) -> list[str]:
    model = runs.integer_net(wrapping)
    indices = wrappings.local_indices(model, wrapping)
    ones = torch.ones(1, model.l1.in_features)
    scores = references.synflow(model, runs.WEIGHTS, ones, {})
    masks = references.synflow_masks(model, runs.WEIGHTS, ones, 0.8, 4)
    model = wrappings.wrap(model, wrapping)
    model(ones).sum().backward()  # FSDP adds attributes in the first forward
    model.zero_grad()
    before = snapshot(model)
    criterion = criteria.SynFlow(runs.named_targets(model, runs.WEIGHTS), model=model)
    criterion.measure(lambda: model(ones))
    wrong = changes(before, snapshot(model))
    # DDP multiplies by 1/3, which is no float: there scores and masks equal only to rounding.
    is_exact = wrapping != "ddp-3"
    for (name, whole), score in zip(scores.items(), criterion.scores().values(), strict=True):
        part, mine = wrappings.my_part(whole, indices[name]), wrappings.local(score)
        if not torch.allclose(mine, part, rtol=0 if is_exact else 1e-6, atol=0):
            wrong.append(f"{name}: {mine} is not {part}")
    report = criterion.prune(lambda: model(ones), 0.8, rounds=4)
    if report.num_pruned != round(0.8 * report.num_elements):
        wrong.append(f"{report.num_pruned} are pruned of {report.num_elements}")
    return wrong + (wrong_masks(model, masks, indices) if is_exact else [])


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.TRAINED))
def test_synflow(wrapping):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(differences_of_synflow, size, wrapping))


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
