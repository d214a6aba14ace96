"""AdamSecondMoment reads what the optimizer keeps, wherever the wrapper lets it keep that."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.criteria import AdamSecondMoment
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong

BETA, STEPS = 0.9, 3


def expected_scores(model: nn.Module, batches) -> dict[str, torch.Tensor]:
    """arXiv 1412.6980, algorithm 1, and Optimal Brain Damage, equation 6, in float64."""
    found = {}
    for name in runs.WEIGHTS:
        weight, moment = model.get_parameter(name), 0.0
        for batch in batches:
            (gradient,) = torch.autograd.grad(runs.loss(model, *batch), weight)
            moment = BETA * moment + (1 - BETA) * gradient.double() ** 2
        corrected = moment / (1 - BETA ** len(batches))
        found[name] = (0.5 * weight.double() ** 2 * corrected).float().detach()
    return found


def differences(wrapping: str) -> list[str]:
    dense = runs.integer_net(wrapping)
    indices = wrappings.local_indices(dense, wrapping)
    batches = runs.batches(dense, STEPS)
    expected = expected_scores(dense, batches)
    model = wrappings.wrap(runs.integer_net(wrapping), wrapping)
    options = {"lr": 0.0, "weight_decay": 0.1, "betas": (0.5, BETA), "foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    criterion = AdamSecondMoment(runs.named_targets(model, runs.WEIGHTS), optimizer)
    for batch in batches:
        runs.backward(model, batch, *wrappings.data_rank(wrapping))
        optimizer.step()
        optimizer.zero_grad()
    with Traffic() as traffic:
        scores = criterion.scores()
    wrong = [] if traffic.num_bytes <= 40 else [f"{traffic.num_bytes} bytes were sent"]
    for (name, whole), score in zip(expected.items(), scores.values(), strict=True):
        part = wrappings.my_part(whole, indices[name])
        if not torch.allclose(wrappings.local(score), part, rtol=1e-6, atol=0):
            wrong.append(f"{name}: {score} is not {part}")
    report = prune.global_unstructured(
        criterion.parameters, criterion.pruning_method, scores, amount=0.5
    )
    return wrong + ([] if report.num_pruned_now else ["nothing was pruned"])


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_scores(wrapping):
    assert_nothing_wrong(run_ranks(differences, wrappings.world_size(wrapping), wrapping))


def trained(optimizer_of) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = runs.integer_net("plain-1")
    optimizer = optimizer_of(model.parameters())
    runs.backward(model, runs.batches(model, 1)[0], 0, 1)
    optimizer.step()
    return model, optimizer


def test_optimizers_without_second_moments_are_refused():
    for optimizer_of, has in (
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD has nothing"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop has 'step', 'square_avg'"),
        (lambda p: torch.optim.Adafactor(p), "Adafactor has 'step'"),
    ):
        model, optimizer = trained(optimizer_of)
        criterion = AdamSecondMoment(prune.select(model), optimizer)
        with pytest.raises(ValueError, match=rf"l1\.weight: the state of {has}"):
            criterion.scores()


def test_other_refusals():
    model, _ = trained(torch.optim.Adam)
    pairs = prune.select(model)
    with pytest.raises(ValueError, match=r"l1\.weight: the state of AdamW has nothing"):
        AdamSecondMoment(pairs, torch.optim.AdamW(model.parameters())).scores()
    other = torch.optim.AdamW(runs.integer_net("plain-1").parameters())
    with pytest.raises(ValueError, match=r"l1\.weight is none of the optimizer's parameters"):
        AdamSecondMoment(pairs, other).scores()
    with pytest.raises(TypeError, match="optimizer is a list"):
        AdamSecondMoment(pairs, [other])
    with pytest.raises(NotImplementedError, match="Call scores"):
        AdamSecondMoment(pairs, other).update()


def test_an_optimizer_that_accelerate_wraps():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = runs.integer_net("plain-1")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    pairs = prune.select(model)
    runs.backward(model, runs.batches(model, 1)[0], 0, 1)
    gradient = model.l1.weight.grad.clone()
    optimizer.step()
    score = AdamSecondMoment(pairs, optimizer).scores()[model.l1, "weight"]
    torch.testing.assert_close(score, 0.5 * (model.l1.weight * gradient).detach() ** 2)
    accelerator.free_memory()
