"""Criteria on plain modules: states, and calls that are refused by name."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.criteria import SNIP, Custom, Fisher, GradientMagnitude, Movement, Taylor


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def step(net: nn.Module) -> None:
    net(torch.randn(5, 3)).square().sum().backward()


def test_state_of_a_plain_module_through_torch_save(tmp_path):
    net = model()
    criterion = SNIP(prune.select(net))
    step(net)
    criterion.update(0.5)
    torch.save(criterion.state_dict(), tmp_path / "state.pt")
    other = SNIP(list(reversed(prune.select(net))))  # names, not the order, tell parameters apart
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    expected, found = criterion.scores(), other.scores()
    assert all(torch.equal(found[pair], score) for pair, score in expected.items())
    assert (other.num_updates, other.total_weight) == (1, 0.5)
    step(net)
    other.update()
    assert not torch.equal(other.scores()[net[0], "weight"], expected[net[0], "weight"])
    assert all(torch.equal(criterion.scores()[pair], score) for pair, score in expected.items())


def test_states_that_do_not_fit():
    net = model()
    criterion = SNIP(prune.select(net))
    step(net)
    criterion.update()
    before = criterion.scores()
    state = criterion.state_dict()
    few = {"0.weight": state["accumulators"]["0.weight"]}
    odd = {**state["accumulators"], "2.weight": torch.ones(3, 3)}
    for change, message in (
        ({"criterion": "Fisher"}, r"the criterion 'Fisher'; expected 'SNIP'"),
        ({"accumulators": few}, r"nothing of \['2.weight'\]"),
        ({"accumulators": odd}, r"2\.weight: the state has shape \(3, 3\)"),
        ({"accumulators": dict.fromkeys(odd, 3)}, "has a int"),
    ):
        with pytest.raises(ValueError, match=message):
            criterion.load_state_dict({**state, **change})
    assert all(torch.equal(criterion.scores()[pair], score) for pair, score in before.items())


def test_what_is_refused_when_a_criterion_is_made():
    net = model()
    with pytest.raises(TypeError, match=r"parameters\[0\] is a Linear.*select\(model\)"):
        SNIP(net)
    with pytest.raises(TypeError, match=r"parameters\[0\] is a Parameter"):
        SNIP(net.parameters())
    with pytest.raises(ValueError, match="parameters is empty"):
        SNIP([])
    net[2].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"2\.weight is frozen"):
        SNIP(prune.select(net))
    with pytest.raises(NotImplementedError, match=r"0\.weight: dtype torch.complex64 is complex"):
        SNIP(prune.select(nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)), "0.weight"))


def test_what_is_refused_in_an_update():
    net = model()
    criterion = SNIP(prune.select(net))
    with pytest.raises(RuntimeError, match=r"0\.weight has no gradient; expected a call after"):
        criterion.update()
    with pytest.raises(ValueError, match="has seen no unit"):
        criterion.scores()
    step(net)
    for weight in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match=f"weight={weight}; expected"):
            criterion.update(weight)
    net[2].weight.grad = None
    with pytest.raises(RuntimeError, match=r"2\.weight has no gradient"):
        criterion.update()
    net[2].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"2\.weight is frozen"):
        criterion.update()
    assert criterion.num_updates == 0
    assert not criterion.state_dict()["accumulators"]["0.weight"].any()


def test_a_sparse_gradient_is_refused():
    embedding = nn.Embedding(5, 2, sparse=True)
    criterion = SNIP([(embedding, "weight")])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"Embedding.weight \(#0\): its gradient has"):
        criterion.update()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [SNIP, Movement, GradientMagnitude])
def test_accumulators_are_fp32_whatever_the_dtype(kind, dtype):
    layer = nn.Linear(3, 2, dtype=dtype)
    criterion, expected = kind([(layer, "weight")]), 0.0
    for number in range(3):
        layer.weight.grad = torch.full((2, 3), 1 + 2.0**-7 * number, dtype=dtype)
        criterion.update(weight=1 / 3)
        weight = 1.0 if kind is GradientMagnitude else layer.weight.detach().double()
        expected = expected + layer.weight.grad.double() * weight / 3
    (score,) = criterion.scores().values()
    assert score.dtype == torch.float32
    expected = -expected if kind is Movement else expected.abs()
    torch.testing.assert_close(score.double(), expected, rtol=1e-6, atol=1e-7)


def test_parameters_in_another_order_of_memory():
    layer = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    x = torch.randn(1, 2, 4, 4)
    layer(x).square().sum().backward()
    product = (layer.weight * layer.weight.grad).detach()
    custom = Custom([(layer, "weight")], lambda w, g, s: s + w * g, unit="global_batch")
    for criterion, expected in ((SNIP([(layer, "weight")]), product.abs()), (custom, product)):
        criterion.update()
        assert torch.equal(criterion.scores()[layer, "weight"], expected)
    transposed = nn.Linear(3, 2)
    transposed.weight = nn.Parameter(torch.randn(3, 2).T)
    transposed.weight.grad = torch.randn(2, 3)  # row-major
    custom = Custom([(transposed, "weight")], lambda w, g, s: s + w * g, unit="global_batch")
    custom.update()
    expected = (transposed.weight * transposed.weight.grad).detach()
    assert torch.equal(custom.scores()[transposed, "weight"], expected)


def test_custom_refuses_what_it_cannot_do():
    layer = nn.Linear(3, 2)
    pairs = [(layer, "weight")]
    layer.weight.grad = torch.ones(2, 3)
    with pytest.raises(NotImplementedError, match="averaged gradients only"):
        Custom(pairs, lambda w, g, s: s, unit="rank_batch")
    with pytest.raises(ValueError, match=r"update returned \(\) for weights of shape \(2, 3\)"):
        Custom(pairs, lambda w, g, s: s.sum(), unit="global_batch").update()
    with pytest.raises(ValueError, match="non_finite='ignore'; expected 'refuse' or 'skip'"):
        SNIP(pairs, non_finite="ignore")
    signed = Custom(pairs, lambda w, g, s: s - g, unit="global_batch", signed=True)
    signed.update(weight=2)
    assert signed.pruning_method is prune.LowestScore
    assert (signed.scores()[layer, "weight"] == -2).all()
    with pytest.raises(TypeError, match=r"scores are signed.*LowestScore"):
        prune.global_unstructured(pairs, prune.L1Unstructured, signed.scores(), amount=1)


def test_a_function_that_raises_at_the_second_parameter_changes_nothing():
    net, fails = model(), False

    def update(weight, gradient, state):
        if fails and weight.shape == net[2].weight.shape:
            raise ArithmeticError("no")
        return state + (weight * gradient).abs()

    criterion = Custom(prune.select(net), update, unit="global_batch")
    step(net)
    criterion.update()
    expected = criterion.scores()
    fails = True
    with pytest.raises(ArithmeticError, match="no"):
        criterion.update()
    assert criterion.num_updates == 1
    assert all(torch.equal(score, expected[pair]) for pair, score in criterion.scores().items())
    fails = False
    criterion.update()
    assert all(torch.equal(score, 2 * expected[pair]) for pair, score in criterion.scores().items())


def test_a_layout_that_changed_is_refused_before_anything_is_added():
    net = model()
    criterion = SNIP(prune.select(net))
    step(net)
    criterion.update()
    expected = criterion.scores()
    old, net[2].weight = net[2].weight, nn.Parameter(torch.ones(3, 4))
    net[2].weight.grad = torch.ones(3, 4)
    with pytest.raises(
        RuntimeError, match=r"this rank's part has shape \(3, 4\), and had \(2, 4\)"
    ):
        criterion.update()
    net[2].weight = old
    assert all(torch.equal(score, expected[pair]) for pair, score in criterion.scores().items())


def test_an_update_that_is_interrupted_while_it_adds_is_refused_until_reset():
    class Interrupted(SNIP):
        def _accumulate(self, part, gradient, factor):
            if part.key != self.parameters[0].fqn:
                raise MemoryError
            super()._accumulate(part, gradient, factor)

    net = model()
    criterion = Interrupted(prune.select(net))
    step(net)
    with pytest.raises(MemoryError):
        criterion.update()
    for call in (criterion.update, criterion.scores, criterion.state_dict):
        with pytest.raises(RuntimeError, match=r"update of this Interrupted ended with.*reset\(\)"):
            call()
    criterion.reset()
    with pytest.raises(ValueError, match="has seen no unit"):
        criterion.scores()


# prune.dense_gradients on plain modules: other layers, tied weights, copies, and refusals.


def pruned_linear() -> nn.Linear:
    layer = nn.Linear(4, 3)
    prune.custom_from_mask(layer, "weight", torch.tensor([[1.0, 0, 1, 0]] * 3))
    return layer


def test_attention_whose_out_proj_is_never_called():
    attention = nn.MultiheadAttention(4, 2, dropout=0.0)
    prune.l1_unstructured(attention.out_proj, "weight", 0.5)
    prune.l1_unstructured(attention, "in_proj_weight", 0.5)
    x = torch.randn(3, 1, 4)
    with prune.dense_gradients(attention):
        attention(x, x, x)[0].square().sum().backward()
        found = {name: p.grad.clone() for name, p in attention.named_parameters()}
    for name in ("out_proj.weight_orig", "in_proj_weight_orig"):
        mask = attention.get_buffer(name.replace("_orig", "_mask"))
        assert found[name][mask == 0].count_nonzero() > 0
        assert torch.equal(attention.get_parameter(name).grad, found[name] * mask)


def test_infinite_values_are_masked_as_outside():
    """orig + (masked - orig).detach() would give other bits, and NaN here."""
    layer = pruned_linear()
    layer.weight_orig.data[0, 0], layer.weight_orig.data[0, 1] = 1e30, float("inf")
    x = torch.ones(1, 4)
    outside = layer(x)
    with prune.dense_gradients(layer):
        inside = layer(x)
    assert torch.equal(inside.isnan(), outside.isnan())
    assert torch.equal(inside.nan_to_num(), outside.nan_to_num())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_in_no_context(copied):
    layer = pruned_linear()
    with prune.dense_gradients(layer):
        other = copied(layer)
    x = torch.randn(2, 4)
    other(x).sum().backward()
    assert other.weight_orig.grad[other.weight_mask == 0].count_nonzero() == 0
    with prune.dense_gradients(other):
        other(x).sum().backward()
        assert other.weight_orig.grad[other.weight_mask == 0].count_nonzero() > 0


def test_pruning_and_removing_inside():
    layer, other = pruned_linear(), nn.Linear(4, 3)
    with prune.dense_gradients([(layer, "weight"), (other, "weight")]):
        (layer(torch.ones(1, 4)) + other(torch.ones(1, 4))).sum().backward()
        prune.l1_unstructured(layer, "weight", 2)
    assert layer.weight_orig.grad[layer.weight_mask == 0].count_nonzero() == 0
    assert layer.weight_orig.grad[layer.weight_mask == 1].count_nonzero() == 4
    assert other.weight.grad.count_nonzero() == 12
    layer.zero_grad()
    with prune.dense_gradients(layer):
        layer(torch.ones(1, 4)).sum().backward()
        prune.remove(layer, "weight")
    assert layer.weight.grad.count_nonzero() == 12


class OwnMask(prune.L1Unstructured):
    def apply_mask(self, module):
        return super().apply_mask(module) * 2


def test_what_is_refused():
    layer = nn.Linear(4, 3)
    OwnMask.apply(layer, "weight", amount=2)
    with (
        pytest.raises(NotImplementedError, match=r"Linear\.weight: the apply_mask of OwnMask"),
        prune.dense_gradients(layer),
    ):
        pass
    layer(torch.ones(1, 4)).sum().backward()
    with (
        pytest.raises(TypeError, match=r"parameters\[0\] is a Parameter"),
        prune.dense_gradients(layer.parameters()),
    ):
        pass


# Fisher and Taylor in one process, without process groups: formulas by hand, and what is meant.


class Scaled(nn.Module):
    """The loss is the sum of weight * x: its gradient is x."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x):
        return (self.weight * torch.tensor(x)).sum()


def scores_of(criterion, module, batches):
    with criterion.calibrating():
        for weight, x in batches:
            with criterion.batch(weight=weight):
                module(x).backward()
    (scores,) = criterion.scores().values()
    return scores.tolist()


BATCHES = [(1, [1.0, -2.0, 0.0]), (3, [3.0, 2.0, 0.0])]  # E[g^2] = [7, 4, 0]; E[|g|] = [2.5, 2, 0]


def test_weights_that_change_are_read_with_the_scores():
    module = Scaled([2.0, -1.0, 5.0])
    criterion = Taylor([(module, "weight")], unit="rank_batch")
    scores_of(criterion, module, BATCHES)
    with torch.no_grad():
        module.weight.fill_(1.0)
    (scores,) = criterion.scores().values()
    assert scores.tolist() == [7.0, 4.0, 0.0]


def test_sparse_gradients_count_rows_that_occur_twice_once():
    dense, sparse = nn.Embedding(5, 2), nn.Embedding(5, 2, sparse=True)
    sparse.weight.data.copy_(dense.weight)
    tokens, found = torch.tensor([1, 3, 1]), []
    for module in (dense, sparse):
        criterion = Fisher([(module, "weight")], unit="rank_batch")
        with criterion.calibrating(), criterion.batch():
            module(tokens).square().sum().backward()
        found.append(*criterion.scores().values())
    assert torch.equal(*found) and bool(found[0][1].gt(0).all())


def test_weights_that_are_all_zero():
    module = Scaled([1.0])
    criterion = Fisher([(module, "weight")], unit="rank_batch")
    with criterion.calibrating(), criterion.batch(weight=0):
        module([2.0]).backward()
    with pytest.raises(ValueError, match=r"Scaled\.weight.*weights of all its batches are 0"):
        criterion.scores()


def test_a_state_of_another_moment_is_refused():
    module = Scaled([1.0])
    pairs = [(module, "weight")]
    criterion = Taylor(pairs, unit="rank_batch", power=1)
    scores_of(criterion, module, [(1, [2.0])])
    with pytest.raises(ValueError, match=r"E\[\|g\|\^1\]"):
        Taylor(pairs, unit="rank_batch", power=2).load_state_dict(criterion.state_dict())
    other = Taylor(pairs, unit="rank_batch", power=1)
    other.load_state_dict(criterion.state_dict())
    assert other.scores()[pairs[0]].tolist() == [2.0]
