"""Shrinking: the smaller model is the one with zeros or without a router's choice; what goes."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from distprune import language_models
from helpers.causal_language_models import small_model
from helpers.streaming import tokens

# By class: the matrix whose inputs are the neurons, in a layer.
DENSE = {
    "LlamaForCausalLM": "mlp.down_proj",
    "GPT2LMHeadModel": "mlp.c_proj",
    "Gemma3ForCausalLM": "mlp.down_proj",
    "Phi3ForCausalLM": "mlp.down_proj",
    "Qwen3ForCausalLM": "mlp.down_proj",
    "OPTForCausalLM": "fc2",
    "GPTNeoXForCausalLM": "mlp.dense_4h_to_h",
    "Starcoder2ForCausalLM": "mlp.c_proj",
    "NemotronForCausalLM": "mlp.down_proj",
}
OF_GROUPS = {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_local_experts": 8, "n_group": 2,
    "topk_group": 1, "num_hidden_layers": 3,
}  # fmt: skip
# By class: changes of its configuration.
MIXTURES = {
    "MixtralForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "GptOssForCausalLM": {},
    "DeepseekV3ForCausalLM": OF_GROUPS,
    "OlmoeForCausalLM": {},
    "Glm4MoeForCausalLM": OF_GROUPS,
    "GraniteMoeForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {},
    "PhimoeForCausalLM": {},
}
WINDOWS = tokens(4, seed=1)


def model_of(name, **changes):
    """A model whose biases are not zero."""
    model = small_model(name, **changes)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, 0, 0.02)
    return model


def logits(model, windows=WINDOWS):
    with torch.no_grad():
        return model(input_ids=windows.tokens).logits


def without(report, kind):
    return {row.name: list(row.removed) for row in report.layers if row.kind == kind}


def last_matrices(model, name, layers):
    return [model.get_submodule(f"{layer}.{DENSE[name]}") for layer in layers]


@pytest.mark.parametrize("name", DENSE)
def test_without_neurons_is_with_zeros(name, tmp_path):
    model = model_of(name)
    before = copy.deepcopy(model.state_dict())
    small, report = language_models.shrink(
        model, WINDOWS, neurons=0.25, round_to=3, update=False, batch_size=2
    )
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    removed = without(report, "neurons")
    assert [len(numbers) for numbers in removed.values()] == [6, 6]
    zeroed = copy.deepcopy(model)
    for layer, numbers in removed.items():
        (module,) = last_matrices(zeroed, name, [layer])
        columns = module.weight if name == "GPT2LMHeadModel" else module.weight.T
        columns.data[numbers] = 0
    assert torch.allclose(logits(zeroed), logits(small), rtol=1e-4, atol=1e-5)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, small)]
    assert sizes == [report.parameters_before, report.parameters_after] and sizes[1] < sizes[0]
    small.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(small))
    logits(small.train()).sum()
    small(input_ids=WINDOWS.tokens, labels=WINDOWS.tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


@pytest.mark.parametrize("name", DENSE)
def test_the_update_lowers_the_error_of_each_layer(name):
    model = model_of(name)
    before = copy.deepcopy(model.state_dict())
    _, report = language_models.shrink(model, WINDOWS, neurons=0.25, round_to=2)
    assert len(report.layers) == 2
    assert all(row.error_after < 0.9 * row.error_before for row in report.layers)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert str(report).count("6 of 24 neurons") == 2


def test_the_update_is_the_closed_form_for_what_smaller_layers_give():
    """W' = W H[:, S] (H[S, S] + d)^-1, H of the inputs after the layers before have shrunk."""
    name = "LlamaForCausalLM"
    model, windows = model_of(name), tokens(64, seed=2)
    small, report = language_models.shrink(model, windows, neurons=0.25, round_to=1, damping=0.3)
    mixed = copy.deepcopy(model)
    for row in report.layers:
        (module,) = last_matrices(mixed, name, [row.name])
        (found,) = last_matrices(small, name, [row.name])
        inputs = []
        handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))  # noqa: B023
        logits(mixed, windows)
        handle.remove()
        rows = inputs[0].flatten(0, 1).double()
        gram = rows.T @ rows
        gram.diagonal().mul_(1.3)
        stay = sorted({*range(24)} - {*row.removed})
        weight = module.weight.double().detach()
        right = torch.linalg.solve(gram[stay][:, stay], gram[stay] @ weight.T).T
        assert torch.allclose(found.weight.double(), right, atol=1e-5 * right.abs().max())
        module.weight.data.zero_()
        module.weight.data[:, stay] = found.weight.data


def test_neurons_go_by_fisher_by_factors_or_by_magnitude():
    model = model_of("LlamaForCausalLM")
    parts = [(name, model.model.layers[1].mlp.get_submodule(name)) for name in
             ("gate_proj", "up_proj", "down_proj")]  # fmt: skip
    squares = {name: torch.zeros_like(module.weight).double() for name, module in parts}
    for window in WINDOWS.tokens:
        model(input_ids=window[None], labels=window[None]).loss.backward()
        for name, module in parts:
            squares[name] += module.weight.grad.double().square()
        model.zero_grad()
    worths = {True: 0, False: 0}
    for name, module in parts:
        rows, columns = squares[name].sum(1, keepdim=True), squares[name].sum(0, keepdim=True)
        magnitudes = module.weight.detach().double().square()
        dim = 0 if name == "down_proj" else 1
        worths[False] += magnitudes.sum(dim)
        worths[True] += (magnitudes * rows.sqrt() * columns / rows.sqrt().sum()).sum(dim)
    for n, (by_text, worth) in itertools.product((4, 8, 12, 16, 20), worths.items()):
        text = WINDOWS if by_text else None
        _, report = language_models.shrink(model, text, neurons=n / 24, round_to=4)
        assert sorted(worth.argsort()[:n].tolist()) == list(report.layers[1].removed)
    assert report.layers[1].error_after is None


def test_a_size_that_the_configuration_leaves_open():
    model = model_of("GPT2LMHeadModel", n_inner=None)
    small, report = language_models.shrink(model, neurons=0.25, round_to=16)
    assert [row.total for row in report.layers] == [64, 64] and small.config.n_inner == 48
    assert logits(small).isfinite().all()


class NotChosen(TorchFunctionMode):
    """Routers give no expert of some a chance."""

    def __init__(self, removed):
        super().__init__()
        self._removed = removed  # by router weight

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for weight, numbers in self._removed:
            if func is functional.linear and args[1] is weight:
                out[..., numbers] = -torch.inf
        return out


def routers(model, layer, num_experts):
    """The weight of the router, and what is added to its choice, of a layer."""
    state = model.get_submodule(layer).state_dict(keep_vars=True).items()
    shape = (num_experts, model.config.hidden_size)
    (weight,) = (t for n, t in state if t.shape == shape and (".gate." in n or ".router." in n))
    return weight, [t for name, t in state if "correction" in name]


@pytest.mark.parametrize("name", MIXTURES)
def test_without_experts_is_without_their_chance(name, tmp_path):
    model = model_of(name, **MIXTURES[name])
    before = copy.deepcopy(model.state_dict())
    small, report = language_models.shrink(model, WINDOWS, experts=0.25, batch_size=3)
    total = report.layers[0].total
    removed = without(report, "experts")
    assert [len(numbers) for numbers in removed.values()] == [total // 4] * len(removed)
    if MIXTURES[name]:
        assert all([number // 4 for number in numbers] == [0, 1] for numbers in removed.values())
    masked, chances = copy.deepcopy(model), []
    for layer, numbers in removed.items():
        weight, corrections = routers(masked, layer, total)
        chances.append((weight, numbers))
        for each in corrections:
            each.data[..., numbers] = -torch.inf
    with NotChosen(chances):
        expected = logits(masked)
    assert torch.allclose(expected, logits(small), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(model), logits(small), rtol=1e-3, atol=1e-3)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    small.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(logits(loaded), logits(small), atol=1e-6)


def test_experts_go_by_their_outputs_and_gates():
    """The mean over tokens of gate weight times norm, token by token.

    Sums in place of means, or norms without gates, would choose others.
    """
    model = model_of("MixtralForCausalLM")
    layer, worth = model.model.layers[0], torch.zeros(3, 4, dtype=torch.float64)
    torch.manual_seed(0)
    nn.init.normal_(layer.mlp.gate.weight)
    calls = []
    layer.mlp.experts.register_forward_pre_hook(lambda _, args: calls.append(args))
    logits(model)
    experts = layer.mlp.experts
    for state, chosen, gates in zip(*calls[0], strict=True):
        for expert, gate in zip(chosen.tolist(), gates, strict=True):
            one, other = (experts.gate_up_proj[expert] @ state).chunk(2)
            output = experts.down_proj[expert] @ (functional.silu(one) * other)
            norm = output.norm().item()
            worth[:, expert] += torch.tensor([1, gate.item() * norm, norm])
    _, report = language_models.shrink(model, WINDOWS, experts=0.5)
    found, *others = (
        sorted(each.argsort()[:2].tolist())
        for each in (worth[1] / worth[0], worth[1], worth[2] / worth[0])
    )
    assert list(report.layers[0].removed) == found and found not in others


def test_experts_without_a_token_are_named_and_go_last():
    model = model_of("GptOssForCausalLM")
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.router.weight)
        layer.mlp.router.bias.data = torch.tensor([0, 0, -1e4, 0])
    for unseen_first in (False, True):
        _, report = language_models.shrink(model, WINDOWS, experts=0.25, unseen_first=unseen_first)
        assert [row.unseen for row in report.layers] == [(2,), (2,)]
        assert all((row.removed == (2,)) == unseen_first for row in report.layers)
    assert str(report).splitlines()[2].endswith(" 2")


def test_neurons_and_experts_go_together():
    model = model_of("DeepseekV3ForCausalLM", **OF_GROUPS)
    small, report = language_models.shrink(model, WINDOWS, neurons=0.5, experts=0.25, round_to=4)
    found = [(row.kind, len(row.removed)) for row in report.layers]
    assert found == [("experts", 2), ("experts", 2), ("neurons", 12)]
    assert (small.config.intermediate_size, small.config.n_routed_experts) == (12, 6)
    assert logits(small).isfinite().all()


@pytest.mark.parametrize(
    ("name", "share", "message"),
    [
        ("MixtralForCausalLM", {"neurons": 0.25}, r"experts.down_proj is not what a smaller inter"),
        ("BitNetForCausalLM", {"neurons": 0.25}, "is not what a smaller intermediate_size may"),
        ("MambaForCausalLM", {"neurons": 0.25}, "mixer.A_log is not what a smaller inter"),
        ("Gemma3nForCausalLM", {"neurons": 0.25}, "no number of the configuration .* neurons"),
        ("Qwen3MoeForCausalLM", {"neurons": 0.25}, "no number of the configuration .* neurons"),
        ("LlamaForCausalLM", {"experts": 0.25}, "no number of the configuration .* experts"),
        ("Llama4ForCausalLM", {"experts": 0.25}, "experts.down_proj is not what a smaller num_lo"),
        ("DeepseekV4ForCausalLM", {"experts": 0.25}, "is not what a smaller num_local_experts may"),
        ("JetMoeForCausalLM", {"experts": 0.25}, "input_linear.weight is not what"),
    ],
)
def test_families_that_cannot_are_refused_before_anything_runs(name, share, message):
    model = model_of(name)
    model.forward = None
    with pytest.raises(NotImplementedError, match=message):
        language_models.shrink(model, WINDOWS, round_to=2, **share)


def test_arguments_that_are_wrong():
    model = model_of("LlamaForCausalLM")

    def refused(kind, message, model=model, windows=WINDOWS, **options):
        with pytest.raises(kind, match=message):
            language_models.shrink(model, windows, **options)

    refused(ValueError, "neurons=0, experts=0.0", neurons=0)
    refused(ValueError, "neurons=1.5", neurons=1.5)
    refused(ValueError, "0 of intermediate_size=24 would be left, in multiples of 128", neurons=0.2)
    refused(ValueError, "24 of intermediate_size=24 would be left", neurons=0.01, round_to=2)
    refused(NotImplementedError, "DataParallel is wrapped", nn.DataParallel(model), neurons=0.2)
    refused(
        NotImplementedError, "Linear is wrapped, sharded, or no model", nn.Linear(2, 2), neurons=0.2
    )
    mixture = model_of("MixtralForCausalLM")
    refused(ValueError, "experts=0.25 without windows", mixture, None, experts=0.25)
    refused(ValueError, "1 experts in 1 groups .* goes to 2", mixture, experts=0.75)
    grouped = model_of("DeepseekV3ForCausalLM", **OF_GROUPS)
    refused(ValueError, "2 experts in 2 groups would be left", grouped, experts=0.75)
    model.model.layers[1].mlp.up_proj.weight.data[3] = torch.nan
    refused(ValueError, "model.layers.1: what some of its neurons", windows=None, neurons=0.5,
            round_to=2)  # fmt: skip


def test_moved_weights_that_are_not_finite_are_refused(monkeypatch):
    model = model_of("LlamaForCausalLM")
    before = copy.deepcopy(model.state_dict())
    moved = lambda view, *_: (view.double() * 1e300, 0.0, 0.0)  # noqa: E731
    monkeypatch.setattr("distprune.language_models.shrinking.solve_columns", moved)
    with pytest.raises(ValueError, match=r"0.mlp.down_proj.weight: moved weights are not finite"):
        language_models.shrink(model, WINDOWS, neurons=0.25, round_to=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
