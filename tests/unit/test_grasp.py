"""GraSP on one process: finite differences beside the exact Hessian."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import distprune as prune
from distprune import criteria
from helpers import criterion_references as references


def classifier(dtype=torch.float32, *, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(20, 32), nn.BatchNorm1d(32) if norm else nn.Identity(), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    return model.to(dtype)


NAMES = ["0.weight", "3.weight", "5.weight"]


def pairs_of(model):
    return [(model.get_submodule(name.split(".")[0]), "weight") for name in NAMES]


def batches_of(number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(64, 20, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(10, (64,), generator=generator),
        )
        for _ in range(number)
    ]


def losses_of(batches):
    return [lambda m, x=x, y=y: functional.cross_entropy(m(x), y) for x, y in batches]


def runner(model, batches):
    def backward():
        for loss in losses_of(batches):
            loss(model).backward()

    return backward


def relative_error(model, scores, expected):
    found = torch.cat([scores[pair].double().flatten() for pair in pairs_of(model)])
    exact = torch.cat([expected[name].double().flatten() for name in NAMES])
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.float64, 1e-5)])
def test_scores_are_those_of_the_exact_hessian(dtype, bound, num_batches, norm):
    """Measured: 3e-5 in float32, 2e-6 in float64."""
    model, batches = classifier(dtype, norm=norm), batches_of(num_batches, dtype)
    expected = references.grasp(model, NAMES, losses_of(batches))
    criterion = criteria.GraSP(pairs_of(model), model=model)
    criterion.measure(runner(model, batches))
    error = relative_error(model, criterion.scores(), expected)
    assert error < bound, error


def test_the_lowest_signed_scores_are_pruned():
    model, batches = classifier(torch.float64), batches_of(1, torch.float64)
    expected = references.grasp(model, NAMES, losses_of(batches))
    criterion = criteria.GraSP(pairs_of(model), model=model, step=1e-4)
    criterion.measure(runner(model, batches))
    prune.global_unstructured(
        criterion.parameters, criterion.pruning_method, criterion.scores(), amount=1000
    )
    pruned = torch.cat([module.weight_mask.flatten() == 0 for module, _ in pairs_of(model)])
    exact = torch.cat([expected[name].flatten() for name in NAMES])
    assert int(pruned.sum()) == 1000
    assert exact[pruned].max() < exact[~pruned].min() + 1e-9


def test_pruned_weights_stay_out():
    """The Hessian of the pruned model, and scores of 0 where the mask is 0."""
    model, batches = classifier(torch.float64), batches_of(2, torch.float64)
    prune.global_unstructured(pairs_of(model), prune.L1Unstructured, amount=0.5)
    dense = classifier(torch.float64)
    masks = [module.weight_mask for module, _ in pairs_of(model)]
    with torch.no_grad():
        for (module, _), mask in zip(pairs_of(dense), masks, strict=True):
            module.weight.mul_(mask)
    losses = losses_of(batches)
    parameters = [module.weight for module, _ in pairs_of(dense)]
    gradients = torch.autograd.grad(
        sum(loss(dense) for loss in losses), parameters, create_graph=True
    )
    dot = sum((g.detach() * mask * g).sum() for g, mask in zip(gradients, masks, strict=True))
    products = torch.autograd.grad(dot, parameters)
    criterion = criteria.GraSP(pairs_of(model), model=model, step=1e-4)
    criterion.measure(runner(model, batches))
    for score, product, weight, mask in zip(
        criterion.scores().values(), products, parameters, masks, strict=True
    ):
        assert torch.all(score[mask == 0] == 0)
        exact = (product * weight).float()[mask != 0]
        assert torch.allclose(score[mask != 0], exact, rtol=1e-4, atol=1e-7)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model, state, modes):
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(fails):
    """Batch statistics, too, which every forward in training mode changes."""
    model, batches, calls = classifier(norm=True), batches_of(2), []
    model[3].eval()
    state, modes = state_of(model), [module.training for module in model.modules()]
    backward = runner(model, batches)

    def run():
        calls.append(None)
        backward()
        if fails and len(calls) == 2:
            raise OSError("the batches are gone")

    criterion = criteria.GraSP(pairs_of(model), model=model)
    if fails:
        with pytest.raises(OSError, match="the batches are gone"):
            criterion.measure(run)
        with pytest.raises(ValueError, match="has seen no unit"):
            criterion.scores()
    else:
        criterion.measure(run)
        assert len(calls) == 3
    assert_unchanged(model, state, modes)


def test_every_run_has_the_same_random_numbers():
    model, batches, drawn = classifier(), batches_of(1), []
    model.insert(1, nn.Dropout(0.5))
    backward = runner(model, batches)

    def run():
        drawn.append(torch.rand(3))
        backward()

    before = torch.get_rng_state()
    pairs = [(module, "weight") for module in model if isinstance(module, nn.Linear)]
    criteria.GraSP(pairs, model=model).measure(run)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_refused_by_name():
    model, batches = classifier(), batches_of(1)
    backward = runner(model, batches)
    for step in (0, 1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="step="):
            criteria.GraSP(pairs_of(model), model=model, step=step)
    with pytest.raises(TypeError, match="model is a function"):
        criteria.GraSP(pairs_of(model), model=backward)
    criterion = criteria.GraSP(pairs_of(model), model=model)
    with pytest.raises(NotImplementedError, match=r"expected measure\(...\)"):
        criterion.update()
    with pytest.raises(NotImplementedError, match=r"expected measure\(...\)"), criterion.batch():
        pytest.fail("entered")
    backward()
    with pytest.raises(RuntimeError, match=r"^0.weight has a gradient"):
        criterion.measure(backward)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"Linear.weight \(#0\) has no gradient"):
        criterion.measure(lambda: None)
    with pytest.raises(ValueError, match="all gradients of the 3 parameters are zero"):
        criterion.measure(lambda: (model(batches[0][0]).sum() * 0).backward())
    with pytest.raises(ValueError, match=r"\(#0\) has a gradient that is not finite"):
        criterion.measure(lambda: (model(batches[0][0]).sum() * torch.inf).backward())
    loss = model(batches[0][0]).sum()
    with pytest.raises(RuntimeError, match="was used by a forward whose backward is still to come"):
        criterion.measure(backward)
    del loss


@pytest.mark.parametrize("kind", ["GraSP", "SynFlow"])
def test_a_saved_measurement_has_the_same_scores(kind, tmp_path):
    model, batches = classifier(), batches_of(1)
    measured = getattr(criteria, kind)(pairs_of(model), model=model)
    ones = torch.ones(1, 20)
    measured.measure(runner(model, batches) if kind == "GraSP" else lambda: model(ones))
    torch.save(measured.state_dict(), tmp_path / "state.pt")
    restored = getattr(criteria, kind)(pairs_of(model), model=model)
    restored.load_state_dict(torch.load(tmp_path / "state.pt"))
    scores = restored.scores()
    assert all(torch.equal(scores[pair], score) for pair, score in measured.scores().items())
