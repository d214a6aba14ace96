"""Values that change for a while on plain modules, beside test_changed_values_on_wrappers.py."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune._common.process_groups import world
from distprune.masks.values import changed_values, keep_copy, keep_signs

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40]


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).clone()


@pytest.mark.parametrize("keep", [keep_copy, keep_signs])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["rows", "transposed", "channels_last", "gaps", "empty", "0-d"])
def test_every_bit_comes_back(keep, dtype, layout):
    special = torch.tensor(SPECIAL, dtype=dtype)
    values = torch.cat([special, special.neg(), torch.randn(54).to(dtype)])
    match layout:
        case "rows":
            values = values.view(8, 9)
        case "transposed":
            values = values.view(9, 8).t()
        case "channels_last":
            values = values.view(2, 3, 4, 3).to(memory_format=torch.channels_last)
        case "gaps":
            values = values.view(8, 9)[:, ::2]
        case "empty":
            values = values.view(8, 9)[:0]
        case "0-d":
            values = values[3]
    before = bits(values)
    restore = keep(values)
    values.abs_()
    assert values.numel() == 0 or not torch.equal(bits(values), before)
    assert not torch.signbit(values).any()
    restore()
    assert torch.equal(bits(values), before)


def test_signs_of_several_chunks():
    values = torch.randn(600_001)
    before = values.clone()
    restore = keep_signs(values)
    values.abs_()
    restore()
    assert torch.equal(values, before)


def doubled(_, values):
    values.mul_(2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def pairs(model):
    return [(model[0], "weight"), (model[2], "weight"), (model[0], "bias")]


X = torch.ones(2, 4)


@pytest.mark.parametrize("pruned", [False, True])
def test_autograd_and_the_optimizer_notice_nothing(model, pairs, pruned):
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    if pruned:
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.4)
    versions = [p._version for p in model.parameters()]
    objects = [id(p) for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters()]
    with changed_values(pairs, doubled, world()):
        pass
    assert [p._version for p in model.parameters()] == versions
    assert [id(p) for p in model.parameters()] == objects
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    optimizer.step()


def test_gradients_inside_are_those_at_the_new_values(model, pairs):
    with changed_values(pairs, doubled, world()):
        model(X).square().sum().backward()
    inside = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        for module, name in pairs:
            getattr(module, name).mul_(2)
    model(X).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), inside, strict=True))


def test_a_tied_parameter_changes_once(model):
    model[2] = nn.Linear(4, 5)
    model[2].weight = model[0].weight
    before = model[0].weight.detach().clone()
    with changed_values([(model[0], "weight"), (model[2], "weight")], doubled, world()):
        assert torch.equal(model[0].weight.detach(), 2 * before)
    assert torch.equal(model[0].weight.detach(), before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_leaves_the_values(model, pairs, error):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error), changed_values(pairs, doubled, world()):
        loss = model(X).sum()
        raise error(loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_inference_mode(model, pairs):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode(), changed_values(pairs, doubled, world()):
        model(X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(X).sum().backward()
