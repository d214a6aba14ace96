"""Copies and stored models, where torch.nn.utils.prune fails or surprises."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from equal_modules import fill_distinct, first_output, snapshot
from pruned_models import (
    MODELS,
    linear,
    pruned_globally,
    pruned_twice,
    sparse_values_stay_zero,
    train,
)
from torch import nn

import distprune as prune


def assert_equal_states(model: nn.Module, other: nn.Module) -> None:
    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


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


CONVERSIONS = {
    "double": lambda module: module.double(),
    "half": lambda module: module.half(),
    "to": lambda module: module.to(torch.float64),
    "share_memory": lambda module: module.share_memory(),
    "_apply": lambda module: module._apply(torch.clone),
}


def lstm() -> nn.LSTM:
    return fill_distinct(nn.LSTM(6, 4), torch.float32, 0)


def out_proj() -> nn.Linear:
    return fill_distinct(nn.MultiheadAttention(6, 2), torch.float32, 0).out_proj


def described(module: nn.Module) -> list:
    tensors = {**module._parameters, **module._buffers}
    return [
        {name: (tensor.dtype, tensor.is_shared()) for name, tensor in tensors.items()},
        [weight.dtype for weight in getattr(module, "_flat_weights", ())],
        repr(module),
    ]


class TestShallowCopies:
    @pytest.mark.parametrize("owns_registries", [False, True])
    @pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
    @pytest.mark.parametrize(
        ("make", "name"), [(linear, "weight"), (lstm, "weight_hh_l0"), (out_proj, "weight")]
    )
    def test_converted_as_in_torch(self, make, name, convert, owns_registries, monkeypatch):
        if owns_registries:  # conversions then leave the original's tensors alone
            overwrite = "get_overwrite_module_params_on_conversion"
            monkeypatch.setattr(torch.__future__, overwrite, lambda: True)
        left = []
        for library in (prune, torch_prune):
            module = library.l1_unstructured(make(), name, 0.5)
            mask = getattr(module, name + "_mask").clone()
            clone = copy.copy(module)
            if owns_registries:
                for registry in ("_parameters", "_buffers"):
                    clone.__dict__[registry] = dict(module.__dict__[registry])
            assert convert(clone) is clone
            left.append([described(module), described(clone)])
            if library is prune:
                for each in (module, clone):
                    kept = getattr(each, name + "_mask")
                    assert torch.equal(kept, mask.to(kept.dtype)) and not kept.all()
        assert left[0] == left[1]
