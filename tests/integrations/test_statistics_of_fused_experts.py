"""Fused experts of transformers' families: sums of what each expert is called with."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from distprune.language_models import linear_layers
from distprune.statistics import ActivationStatistics
from helpers.tiny_transformers import tiny_model

pytest.importorskip("transformers")

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe"]
IDS = torch.arange(3, 27).view(3, 8)


def fused(model):
    return [pair for pair in linear_layers(model) if "experts" in pair.fqn]


def totals_of(model, implementation, dtype=torch.float32):
    model = copy.deepcopy(model).to(dtype)
    model.set_experts_implementation(implementation)
    statistics = ActivationStatistics(fused(model))
    with statistics.collecting():
        model(input_ids=IDS)
    return {pair.fqn: totals for pair, totals in statistics.totals().items()}


def of_linear_layers(model):
    """The same, where every expert is layers of its own, which a hook sees."""
    model = copy.deepcopy(model)
    model.set_experts_implementation("eager")
    seen = {}
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(getattr(module, "is_transposed", None), bool):
                seen |= split(path, module)
        model(input_ids=IDS)
    return seen


class Matrix:
    """What stands for the weight of all experts: ``weight[e]`` is one that notes its inputs."""

    def __init__(self, weight, is_transposed):
        self.weight, self.is_transposed = weight, is_transposed
        self.rows = [[] for _ in weight]

    def __getitem__(self, expert):
        noted = self.weight[expert].as_subclass(Noted)
        noted.rows = self.rows[int(expert)]
        return noted


class Noted(torch.Tensor):
    """A matrix that keeps what it is multiplied with."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (functional.linear, torch.Tensor.matmul, torch.Tensor.__matmul__):
            args[1].rows.append(args[0].detach().double())
            args = (args[0], args[1].as_subclass(torch.Tensor), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def split(path, module):
    seen = {}
    for name in ("gate_up_proj", "down_proj"):
        weight = module._parameters.pop(name)
        matrix = Matrix(weight.detach(), module.is_transposed)
        module.__dict__[name] = matrix
        seen[f"{path}.{name}"] = matrix.rows
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_are_those_of_each_expert(family):
    model = tiny_model(family)
    found = {name: totals_of(model, name) for name in ("eager", "grouped_mm")}
    for name, calls in of_linear_layers(model).items():
        eager, grouped = found["eager"][name], found["grouped_mm"][name]
        rows = [torch.cat(each) if each else eager.sums.new_zeros(0, 1) for each in calls]
        assert eager.num_tokens == grouped.num_tokens == tuple(map(len, rows))
        assert sum(eager.num_tokens) == IDS.numel() * model.config.num_experts_per_tok
        for expert, of_one in enumerate(rows):
            assert torch.equal(eager.sums[expert], of_one.sum(0).expand_as(eager.sums[expert]))
            close = {"rtol": 1e-9, "atol": 0}  # rows of one call are added in another order
            torch.testing.assert_close(
                eager.squares[expert],
                of_one.square().sum(0).expand_as(eager.squares[expert]),
                **close,
            )
        # The kernels round differently.
        torch.testing.assert_close(eager.squares, grouped.squares, rtol=1e-4, atol=1e-6)


def test_jetmoe():
    model = tiny_model("jetmoe")
    pairs = [pair for pair in linear_layers(model) if model.get_parameter(pair.fqn).ndim == 3]
    statistics = ActivationStatistics(pairs)
    with statistics.collecting():
        model(input_ids=IDS)
    assert len(pairs) >= 4
    for name, num_tokens in statistics.num_tokens().items():
        assert len(num_tokens) == 4 and sum(num_tokens) == IDS.numel() * 2, name


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_implementation_that_gathers_weights_is_refused_by_name(family):
    model = tiny_model(family)
    model.set_experts_implementation("batched_mm")
    statistics = ActivationStatistics(fused(model))
    text = r"layers\.0\.mlp\.experts\.gate_up_proj: .*set_experts_implementation\(\"eager\"\)"
    with statistics.collecting(), pytest.raises(NotImplementedError, match=text):
        model(input_ids=IDS)


def test_routers_and_experts_are_told_apart():
    model = tiny_model("qwen2_moe")
    names = {pair.fqn.rpartition("layers.0.")[2] for pair in linear_layers(model)}
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= names
    assert "mlp.shared_expert.up_proj.weight" in names and "mlp.gate.weight" not in names
    assert isinstance(model.model.layers[0].mlp.shared_expert.up_proj, nn.Linear)
