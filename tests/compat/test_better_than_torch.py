"""Where torch.nn.utils.prune fails or surprises, and what happens here instead."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from equal_modules import bits, distinct, fill_distinct, first_output, snapshot
from torch import Tensor, nn

import distprune as prune


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def linear(seed: int = 0, bias: bool = True) -> nn.Linear:
    return fill_distinct(nn.Linear(6, 5, bias=bias), torch.float32, seed)


def pruned_once() -> tuple[nn.Module, Tensor]:
    return prune.l1_unstructured(linear(), "weight", 0.5), torch.randn(3, 6)


def pruned_twice() -> tuple[nn.Module, Tensor]:
    module = prune.l1_unstructured(linear(), "weight", 0.3)
    prune.random_unstructured(module, "bias", 2)
    return prune.ln_structured(module, "weight", 1, 2, 0), torch.randn(3, 6)


def pruned_globally() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(linear(1), nn.ReLU(), nn.Linear(5, 2))
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
    return model, torch.randn(3, 6)


def pruned_lstm() -> tuple[nn.Module, Tensor]:
    model = fill_distinct(nn.LSTM(3, 4), torch.float32, 0)
    prune.l1_unstructured(model, "weight_hh_l0", 0.5)
    return prune.l1_unstructured(model, "weight_ih_l0", 0.5), torch.randn(5, 2, 3)


def pruned_encoder_layer() -> tuple[nn.Module, Tensor]:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    prune.l1_unstructured(model.self_attn.out_proj, "weight", 0.5)
    prune.l1_unstructured(model.self_attn, "in_proj_weight", 0.5)
    return prune.l1_unstructured(model.linear1, "weight", 0.5) and model, torch.randn(4, 2, 8)


MODELS = [pruned_once, pruned_twice, pruned_globally, pruned_lstm, pruned_encoder_layer]


def train(model: nn.Module, x: Tensor, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = first_output(model(x)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    return losses


def assert_equal_states(model: nn.Module, other: nn.Module) -> None:
    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def sparse_values_stay_zero(model: nn.Module) -> None:
    num_pruned = 0
    for name, mask in model.named_buffers():
        path, _, buffer = name.rpartition(".")
        value = getattr(model.get_submodule(path), buffer.removesuffix("_mask"))
        assert torch.equal(value[mask == 0], torch.zeros_like(value[mask == 0])), name
        num_pruned += int((mask == 0).sum())
    assert num_pruned > 0


class TestCopies:
    @pytest.mark.parametrize("make", MODELS)
    def test_deepcopy_after_a_forward_with_gradients(self, make):
        model, x = make()
        first_output(model(x)).sum().backward()
        clone = copy.deepcopy(model)
        assert_equal_states(clone, model)
        # The copy owns everything it has.
        owned = {t.data_ptr() for t in [*model.parameters(), *model.buffers()]}
        assert not owned & {t.data_ptr() for t in [*clone.parameters(), *clone.buffers()]}
        before = {key: value.clone() for key, value in model.state_dict().items()}
        losses = train(clone, x)
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key
        sparse_values_stay_zero(clone)
        assert train(model, x) == losses

    @pytest.mark.parametrize("make", MODELS)
    def test_deepcopy_of_a_deepcopy(self, make):
        model, x = make()
        clone = copy.deepcopy(model)
        train(clone, x)
        second = copy.deepcopy(clone)
        assert_equal_states(second, clone)
        assert torch.equal(first_output(second(x)), first_output(clone(x)))
        assert train(second, x) == train(clone, x)

    def test_copies_are_pruned_and_removed_alone(self):
        model, x = pruned_twice()
        model(x).sum().backward()
        clone = copy.deepcopy(model)
        before = snapshot(model)
        prune.l1_unstructured(clone, "weight", 2)
        prune.remove(clone, "weight")
        prune.remove(clone, "bias")
        assert snapshot(model) == before
        assert not prune.is_pruned(clone) and prune.is_pruned(model)

    def test_the_copy_of_a_container_is_one(self):
        model, x = pruned_twice()
        model(x).sum().backward()
        hooks = list(copy.deepcopy(model)._forward_pre_hooks.values())
        assert {hook._tensor_name for hook in hooks} == {"weight", "bias"}
        (container,) = (hook for hook in hooks if hook._tensor_name == "weight")
        assert [type(method) for method in container] == [prune.L1Unstructured, prune.LnStructured]

    @pytest.mark.parametrize("make", MODELS)
    @pytest.mark.parametrize("forward_first", [False, True])
    @pytest.mark.parametrize("through", ["pickle", "save"])
    def test_stored_and_loaded(self, make, forward_first, through):
        model, x = make()
        if forward_first:
            first_output(model(x)).sum().backward()
        if through == "pickle":
            loaded = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
        assert_equal_states(loaded, model)
        assert type(loaded).__name__ == type(model).__name__
        model.zero_grad(), loaded.zero_grad()
        assert train(loaded, x) == train(model, x)
        sparse_values_stay_zero(loaded)

    def test_a_state_dict_loads_into_a_model_pruned_alike(self):
        model, x = pruned_globally()
        train(model, x)
        other, _ = pruned_globally()
        with torch.no_grad():
            for tensor in [*other.parameters(), *other.buffers()]:
                tensor.fill_(1)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), model(x))


class TestModulesThatTorchBreaks:
    def test_attention_with_a_pruned_output_trains(self):
        torch.manual_seed(0)
        pruned = nn.MultiheadAttention(8, 2)
        reference = copy.deepcopy(pruned)
        prune.l1_unstructured(pruned.out_proj, "weight", 0.5)
        keep = pruned.out_proj.weight_mask.clone()
        assert int(keep.sum()) == 32
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (pruned, reference)]
        x = torch.randn(5, 3, 8)
        outputs = []
        for _ in range(5):
            weight = reference.out_proj.weight
            changed = {"out_proj.weight": weight * keep}
            expected = torch.func.functional_call(reference, changed, (x, x, x))[0]
            output = pruned(x, x, x)[0]
            assert torch.equal(output, expected)
            outputs.append(output.detach())
            for each, optimizer in zip((output, expected), optimizers, strict=True):
                optimizer.zero_grad()
                each.square().sum().backward()
                optimizer.step()
        assert not torch.equal(outputs[0], outputs[-1])
        assert torch.equal(pruned.out_proj.weight, reference.out_proj.weight * keep)
        prune.remove(pruned.out_proj, "weight")
        assert type(pruned.out_proj) is type(reference.out_proj)
        assert torch.equal(pruned.out_proj.weight, reference.out_proj.weight * keep)

    def test_an_encoder_layer_trains_and_evaluates(self):
        model, x = pruned_encoder_layer()
        train(model, x, steps=5)
        sparse_values_stay_zero(model)
        training_output = model(x)
        with torch.no_grad():
            evaluated = model.eval()(x)  # the fast path reads the weights itself
        assert torch.allclose(evaluated, training_output, atol=1e-5)
        model.train()
        for module, name in (
            (model.self_attn.out_proj, "weight"),
            (model.self_attn, "in_proj_weight"),
            (model.linear1, "weight"),
        ):
            prune.remove(module, name)
        assert torch.equal(model(x), training_output)

    def test_the_flat_weights_of_an_lstm_follow(self):
        model, x = pruned_lstm()
        for _ in range(3):
            train(model, x)
            model(x)
            for name, weight in zip(model._flat_weights_names, model._flat_weights, strict=True):
                assert weight is getattr(model, name)
            assert torch.equal(
                model.weight_hh_l0, model.weight_hh_l0_orig * model.weight_hh_l0_mask
            )
        prune.remove(model, "weight_hh_l0")
        prune.remove(model, "weight_ih_l0")
        assert all(isinstance(weight, nn.Parameter) for weight in model._flat_weights)
        assert [id(w) for w in model._flat_weights] == [id(p) for p in model.parameters()]


def channels_last() -> tuple[nn.Module, nn.Module]:
    plain = fill_distinct(nn.Conv2d(4, 3, 3), torch.float32, 0)
    return copy.deepcopy(plain).to(memory_format=torch.channels_last), plain


def transposed() -> tuple[nn.Module, nn.Module]:
    plain = fill_distinct(nn.Linear(7, 5), torch.float32, 0)
    other = copy.deepcopy(plain)
    other.weight = nn.Parameter(plain.weight.detach().t().contiguous().t())
    return other, plain


@pytest.mark.parametrize("layout", [channels_last, transposed])
@pytest.mark.parametrize("is_tied", [False, True])
class TestMemoryLayouts:
    """Torch views weights as flat and fails; here memory has no say in the mask."""

    def pair(self, layout: Callable, is_tied: bool) -> tuple[nn.Module, nn.Module]:
        other, plain = layout()
        assert not other.weight.is_contiguous()
        if is_tied:
            with torch.no_grad():
                other.weight.fill_(1), plain.weight.fill_(1)
        return other, plain

    @pytest.mark.parametrize("method", ["l1_unstructured", "random_unstructured"])
    def test_single_parameters(self, layout, is_tied, method):
        masks = []
        for module in self.pair(layout, is_tied):
            torch.manual_seed(0)
            for amount in (0.3, 5):
                getattr(prune, method)(module, "weight", amount)
            masks.append(module.weight_mask)
        if method == "l1_unstructured":
            assert torch.equal(*masks)
        assert int((masks[0] == 0).sum()) == int((masks[1] == 0).sum()) > 5

    @pytest.mark.parametrize("method", [prune.L1Unstructured, prune.RandomUnstructured])
    def test_global(self, layout, is_tied, method):
        masks = []
        for module in self.pair(layout, is_tied):
            torch.manual_seed(0)
            for amount in (0.3, 5):
                pairs = [(module, "weight"), (module, "bias")]
                prune.global_unstructured(pairs, method, amount=amount)
            masks.append(module.weight_mask)
        assert torch.equal(*masks)
        assert int((masks[0] == 0).sum()) > 5

    def test_remove_keeps_the_layout(self, layout, is_tied):
        module, _ = self.pair(layout, is_tied)
        strides, parameter = module.weight.stride(), module.weight
        prune.l1_unstructured(module, "weight", 0.5)
        prune.remove(module, "weight")
        assert module.weight is parameter
        assert module.weight.stride() == strides


class TestRefusals:
    @pytest.mark.parametrize("is_pruned", [False, True])
    @pytest.mark.parametrize(
        ("amount", "error"),
        [
            (math.nan, ValueError),
            (math.inf, ValueError),
            (1.5, ValueError),
            (-0.5, ValueError),
            (-1, ValueError),
            (31, ValueError),
            (True, TypeError),
            (False, TypeError),
            ("0.5", TypeError),
            (None, TypeError),
        ],
    )
    def test_amounts(self, amount, error, is_pruned):
        module = linear()
        if is_pruned:
            prune.l1_unstructured(module, "weight", 0)
        before = snapshot(module)
        pairs = [(module, "weight")]
        for call in (
            lambda: prune.l1_unstructured(module, "weight", amount),
            lambda: prune.random_unstructured(module, "weight", amount),
            lambda: prune.ln_structured(module, "weight", amount, 2, 0),
            lambda: prune.random_structured(module, "weight", amount, 0),
            lambda: prune.global_unstructured(pairs, prune.L1Unstructured, amount=amount),
        ):
            with pytest.raises(error, match=r"amount"):
                call()
            assert snapshot(module) == before

    def test_nan_scores_of_a_global_pruning(self):
        model = nn.Sequential(linear(), linear(1))
        with torch.no_grad():
            model[1].weight[2, 3] = math.nan
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"1\.weight.*NaN"):
            prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
        assert snapshot(model) == before

    @pytest.mark.parametrize(
        ("method", "arguments", "message"),
        [
            (
                "L1Unstructured",
                {"ammount": 0.5},
                "L1Unstructured has no argument 'ammount'; expected of its arguments amount, or of "
                "those of global_unstructured group, min_sparsity, max_sparsity, "
                "pipeline_parallel.",
            ),
            (
                "RandomUnstructured",
                {"amount": 0.5, "seed": 1, "min_sparsty": 0.1},
                "RandomUnstructured has no argument 'seed', 'min_sparsty'; expected of its "
                "arguments amount, or of those of global_unstructured group, min_sparsity, "
                "max_sparsity, pipeline_parallel.",
            ),
            (
                "Identity",
                {"amount": 0.5},
                "Identity has no argument 'amount'; expected of its arguments (it has none), or of "
                "those of global_unstructured group, min_sparsity, max_sparsity, "
                "pipeline_parallel.",
            ),
        ],
    )
    def test_keywords_that_the_method_does_not_accept(self, method, arguments, message):
        module = linear()
        before = snapshot(module)
        with pytest.raises(TypeError) as raised:
            prune.global_unstructured([(module, "weight")], getattr(prune, method), **arguments)
        assert str(raised.value) == message
        assert snapshot(module) == before

    def test_keywords_of_a_method_of_ones_own(self):
        class Threshold(prune.BasePruningMethod):
            PRUNING_TYPE = "unstructured"

            def __init__(self, limit, *, factor=1.0, **others):
                self.limit, self.others = limit * factor, others

            def compute_mask(self, t, default_mask):
                return default_mask * (t.abs() >= self.limit)

        module = linear()
        report = prune.global_unstructured(
            [(module, "weight")], Threshold, limit=0.05, factor=2.0, anything=1, amount=3
        )
        kept = module.weight_orig.abs() >= 0.1
        assert torch.equal(module.weight_mask, kept.float())
        assert report.amount == 3

    @pytest.mark.parametrize("method", ["l1_unstructured", "random_unstructured", "identity"])
    def test_a_parameter_that_is_none(self, method):
        module = linear(bias=False)
        before = snapshot(module)
        arguments = () if method == "identity" else (0.5,)
        with pytest.raises(TypeError, match="bias"):
            getattr(prune, method)(module, "bias", *arguments)
        assert snapshot(module) == before
        with pytest.raises(TypeError, match="bias"):
            prune.global_unstructured([(module, "bias")], prune.L1Unstructured, amount=0.5)
        assert snapshot(module) == before

    def test_a_second_pruning_whose_mask_fails(self, monkeypatch):
        module, x = pruned_twice()
        module(x).sum().backward()
        before = snapshot(module)

        def fail(self, t, default_mask):
            raise RuntimeError("no mask")

        class Fails(prune.L1Unstructured):
            compute_mask = fail

        monkeypatch.setattr(prune.LnStructured, "compute_mask", fail)
        pairs = [(module, "bias"), (module, "weight")]
        for call in (
            lambda: prune.ln_structured(module, "weight", 0.5, 2, 0),
            lambda: Fails.apply(module, "weight", 0.5),
            lambda: prune.global_unstructured(pairs, Fails, amount=0.5),
        ):
            with pytest.raises(RuntimeError, match="no mask"):
                call()
            assert snapshot(module) == before
        monkeypatch.undo()
        assert prune.is_pruned(module)
        prune.l1_unstructured(module, "weight", 2)
        prune.remove(module, "weight")

    def test_a_bad_parameter_late_in_a_global_list(self):
        model = nn.Sequential(linear(), linear(1))
        for _ in range(2):  # its container must not grow either
            prune.l1_unstructured(model[0], "weight", 2)
        model[1].weight_mask = "taken"
        before = snapshot(model)
        with pytest.raises(KeyError, match="weight_mask"):
            prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
        assert snapshot(model) == before

    def test_the_default_mask_is_not_written_to(self):
        method = prune.L1Unstructured(3)
        method._tensor_name = "weight"
        default_mask = torch.ones(4, 5)
        mask = prune.PruningContainer(method).compute_mask(torch.randn(4, 5), default_mask)
        assert int(default_mask.sum()) == 20
        assert int(mask.sum()) == 17


class TestEqualScores:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("shape", [(11,), (4, 5), (3, 2, 4), (300, 500)])
    def test_the_lower_index_goes_first(self, dtype, shape):
        for k in (1, 3, 7):
            module = nn.Module()
            module.weight = nn.Parameter(torch.full(shape, -0.5, dtype=dtype))
            prune.l1_unstructured(module, "weight", k)
            prune.l1_unstructured(module, "weight", 2)
            assert module.weight_mask.flatten().nonzero()[0].item() == k + 2
            assert int((module.weight_mask == 0).sum()) == k + 2

    def test_zeros_are_equal_whatever_their_sign(self):
        module = nn.Module()
        module.weight = nn.Parameter(torch.tensor([0.0, -0.0, 0.0, -0.0, 1e-45]))
        prune.l1_unstructured(module, "weight", 3)
        assert module.weight_mask.tolist() == [0, 0, 0, 1, 1]

    def test_channels_of_equal_norm(self):
        module = nn.Linear(5, 4)
        with torch.no_grad():
            module.weight.fill_(0.1)
        prune.ln_structured(module, "weight", 2, 2, 1)
        assert module.weight_mask[0].tolist() == [0, 0, 1, 1, 1]

    def test_global_order_is_that_of_the_list(self):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        for layer in model:
            nn.init.ones_(layer.weight)
        pairs = [(model[1], "weight"), (model[0], "weight")]
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=5)
        assert model[1].weight_mask.flatten().tolist() == [0, 0, 0, 0]
        assert model[0].weight_mask.flatten().tolist() == [0, 1, 1, 1]


class TestGlobalLists:
    def test_tied_parameters_count_once(self):
        first, second = linear(), linear(1)
        second.weight = first.weight
        pairs = [(first, "weight"), (second, "weight")]
        report = prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
        assert (report.num_elements, report.num_pruned) == (30, 15)
        assert int((first.weight_mask == 0).sum()) == 15
        assert torch.equal(first.weight_mask, second.weight_mask)
        prune.remove(first, "weight")
        prune.remove(second, "weight")
        assert first.weight is second.weight
        assert int((first.weight == 0).sum()) == 15

    def test_duplicates_count_once(self):
        module = linear()
        pairs = [(module, "weight"), (module, "weight")]
        report = prune.global_unstructured(pairs, prune.L1Unstructured, amount=6)
        assert report.num_pruned == int((module.weight_mask == 0).sum()) == 6
        assert len(module._forward_pre_hooks) == 1

    def test_a_generator_is_read_once(self):
        model = nn.Sequential(linear(), linear(1))
        pairs = ((layer, "weight") for layer in model)
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=20)
        assert sum(int((layer.weight_mask == 0).sum()) for layer in model) == 20

    def test_masks_are_held_once(self):
        model = nn.Sequential(linear(), linear(1))
        for _ in range(3):
            prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.1)
            for layer in model:
                (hook,) = layer._forward_pre_hooks.values()
                methods = hook if isinstance(hook, prune.PruningContainer) else [hook]
                for method in methods:
                    assert method.mask.data_ptr() == layer.weight_mask.data_ptr()
                # Nor is it a part of something larger.
                assert layer.weight_mask.untyped_storage().nbytes() == 30 * 4

    def test_a_small_layer_beside_a_large_one_is_stored_small(self):
        small, large = linear(), nn.Linear(300, 300)
        pairs = [(small, "weight"), (large, "weight")]
        alone = len(pickle.dumps(prune.l1_unstructured(linear(), "weight", 3)))
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
        assert len(pickle.dumps(small)) < 2 * alone


def count_tensors() -> int:
    gc.collect()
    # By type: isinstance would ask every object for its __class__, and wake lazy ones.
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


class TestMemory:
    @pytest.mark.parametrize("is_global", [False, True])
    def test_repeated_prunings_hold_no_more_tensors(self, is_global):
        model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
        counts = []
        for _ in range(10):
            if is_global:
                prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.1)
            else:
                for layer in model:
                    prune.l1_unstructured(layer, "weight", 0.1)
            model(torch.ones(1, 20)).sum().backward()
            model.zero_grad()
            counts.append(count_tensors())
        assert counts[1:] == [counts[1]] * 9
        assert int((model[0].weight_mask == 0).sum()) > 0

    def test_older_masks_are_left_alone(self):
        module = linear()
        masks = []
        for amount in (5, 5, 5):
            prune.l1_unstructured(module, "weight", amount)
            masks.append(module.weight_mask)
            prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=amount)
            masks.append(module.weight_mask)
        assert [int((mask == 0).sum()) for mask in masks] == [5, 10, 15, 20, 25, 30]

    def test_a_given_mask_is_not_shared_or_changed(self):
        module, mask = linear(), torch.ones(5, 6)
        mask[0] = 0
        prune.custom_from_mask(module, "weight", mask)
        prune.l1_unstructured(module, "weight", 10)
        assert int(mask.sum()) == 24
        mask.zero_()
        assert int((module.weight_mask == 0).sum()) == 16


class TestRemove:
    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -2.0])
    @pytest.mark.parametrize("is_global", [False, True])
    def test_what_was_masked_becomes_plus_zero(self, bad, is_global):
        module = linear()
        with torch.no_grad():
            module.weight[1, 2] = bad
        mask = torch.ones(5, 6)
        mask[1, 2] = 0
        prune.custom_from_mask(module, "weight", mask)
        if is_global:
            prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=3)
        expected = torch.where(module.weight_mask == 0, 0.0, module.weight_orig.detach())
        prune.remove(module, "weight")
        assert bits(module.weight) == bits(expected)
        assert not module.weight.signbit()[1, 2]

    def test_the_order_of_parameters_stays(self):
        model = nn.Sequential(linear(), nn.LSTM(5, 3))
        parameters = list(model.parameters())
        names = list(model.state_dict())
        prune.l1_unstructured(model[0], "weight", 0.5)
        prune.l1_unstructured(model[1], "weight_ih_l0", 0.5)
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        prune.remove(model[0], "weight")
        prune.remove(model[1], "weight_ih_l0")
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        assert list(model.state_dict()) == names

    def test_the_module_is_an_ordinary_one_again(self):
        module, plain = linear(), linear()
        for _ in range(2):
            prune.l1_unstructured(module, "weight", 0.5)
            prune.random_structured(module, "weight", 1, 0)
        module(torch.ones(1, 6)).sum().backward()
        prune.remove(module, "weight")
        assert not prune.is_pruned(module)
        assert type(module) is nn.Linear
        assert sorted(vars(module)) == sorted(vars(plain))
        assert not module._forward_pre_hooks and not module._buffers
        with pytest.raises(ValueError, match="weight"):
            prune.remove(module, "weight")


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_made_before_pruning_goes_on(make_optimizer):
    module = linear()
    arguments = {"momentum": 0.9} if make_optimizer is torch.optim.SGD else {}
    optimizer = make_optimizer(module.parameters(), lr=0.01, **arguments)
    x = torch.randn(4, 6)

    def step() -> float:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    losses = [step()]
    prune.l1_unstructured(module, "weight", 0.2)
    losses += [step() for _ in range(5)]
    assert module.weight_orig in optimizer.state
    prune.l1_unstructured(module, "weight", 0.2)
    stored = optimizer.state_dict()
    losses += [step() for _ in range(5)]
    optimizer.load_state_dict(stored)
    prune.remove(module, "weight")
    losses += [step() for _ in range(5)]
    assert losses[5] < losses[1]
    assert losses[-1] < losses[6]


def test_the_present_weight_is_ranked_without_a_forward():
    module = linear()
    prune.l1_unstructured(module, "weight", 1)
    with torch.no_grad():
        module.weight_orig.copy_(distinct([5, 6], torch.float32, seed=5))
    live = module.weight_mask != 0
    lowest = module.weight_orig.detach().abs().masked_fill(~live, math.inf).argmin()
    prune.l1_unstructured(module, "weight", 1)
    assert module.weight_mask.flatten()[lowest] == 0
    assert int((module.weight_mask == 0).sum()) == 2
