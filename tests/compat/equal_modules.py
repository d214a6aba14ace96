"""Equal modules, one for torch.nn.utils.prune and one for distprune, and how to compare them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

import distprune
import distprune as prune

HALF = (torch.float16, torch.bfloat16)


class Kind(NamedTuple):
    """A model that is to be pruned: how to make it of two sizes, its inputs, its parameters."""

    make: Callable[[int, int], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    names: tuple[str, ...]


def _normal(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)),)


def network(inputs: int = 7, hidden: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 3))


_BOTH = ("weight", "bias")
KINDS = {
    "Linear": Kind(nn.Linear, lambda a, b: _normal(3, a), _BOTH),
    "Conv1d": Kind(lambda a, b: nn.Conv1d(a, b, 3), lambda a, b: _normal(2, a, 5), _BOTH),
    "Conv2d": Kind(lambda a, b: nn.Conv2d(a, b, (2, 3)), lambda a, b: _normal(2, a, 4, 5), _BOTH),
    "Conv3d": Kind(
        lambda a, b: nn.Conv3d(a, b, (1, 2, 2)), lambda a, b: _normal(1, a, 2, 3, 3), _BOTH
    ),
    "ConvTranspose1d": Kind(
        lambda a, b: nn.ConvTranspose1d(a, b, 2), lambda a, b: _normal(2, a, 3), _BOTH
    ),
    "ConvTranspose2d": Kind(
        lambda a, b: nn.ConvTranspose2d(a, b, (1, 2)), lambda a, b: _normal(1, a, 3, 3), _BOTH
    ),
    "Embedding": Kind(
        lambda a, b: nn.Embedding(a + 2, b),
        lambda a, b: (torch.arange(6).view(2, 3) % (a + 2),),
        ("weight",),
    ),
    "LayerNorm": Kind(lambda a, b: nn.LayerNorm(a + 1), lambda a, b: _normal(3, a + 1), _BOTH),
    "Bilinear": Kind(
        lambda a, b: nn.Bilinear(a, b, 3), lambda a, b: _normal(4, a) + _normal(4, b), _BOTH
    ),
    "LSTM": Kind(
        lambda a, b: nn.LSTM(a, b, num_layers=2),
        lambda a, b: _normal(3, 2, a),
        ("weight_ih_l0", "weight_hh_l0", "bias_hh_l0", "weight_ih_l1"),
    ),
    "MultiheadAttention": Kind(
        lambda a, b: nn.MultiheadAttention(2 * a, 2),
        lambda a, b: _normal(3, 2, 2 * a) * 3,
        ("in_proj_weight", "in_proj_bias"),
    ),
    "network": Kind(
        network,
        lambda a, b: _normal(4, a),
        ("0.weight", "0.bias", "1.weight", "2.weight", "2.bias"),
    ),
}
KINDS_IN_HALF = ("Linear", "Conv2d", "Embedding", "LayerNorm", "network")


def distinct(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Shuffled values of random sign, all different in magnitude, in any dtype."""
    n = math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        # Magnitudes are spread over the bit patterns between 1/32 and 2.
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        low, high = (int(torch.tensor(x, dtype=dtype).view(integer)) for x in (1 / 32, 2.0))
        assert n < high - low, f"{dtype} has too few numbers for {n} different ones"
        patterns = low + torch.arange(n) * ((high - low) // max(n, 1))
        magnitudes = patterns.to(integer).view(dtype)
    else:
        magnitudes = torch.arange(1, n + 1, dtype=dtype)
    shuffled = magnitudes[torch.randperm(n, generator=generator)]
    signs = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    return (shuffled * signs.to(dtype)).view(tuple(shape))


def fill_distinct(module: nn.Module, dtype: torch.dtype, seed: int) -> nn.Module:
    """No two values of the module's parameters are equal in magnitude."""
    module.to(dtype)
    parameters = list(module.parameters())
    values = distinct([sum(p.numel() for p in parameters)], dtype, seed)
    pieces = values.split([p.numel() for p in parameters])
    with torch.no_grad():
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.copy_(piece.view(parameter.shape))
    return module


def first_output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def describe_hook(hook: Any) -> Any:
    """Types and settings of the methods of a hook, the same words for both libraries."""
    if isinstance(hook, (torch_prune.PruningContainer, distprune.PruningContainer)):
        return ["container", hook._tensor_name, *(describe_hook(method) for method in hook)]
    settings = {
        key: repr(getattr(hook, key)) for key in ("amount", "n", "dim") if key in vars(hook)
    }
    return [type(hook).__name__, hook._tensor_name, getattr(hook, "PRUNING_TYPE", None), settings]


def described_hooks(module: nn.Module) -> dict[str, Any]:
    """By parameter: torch moves a hook to the end when its parameter is pruned again."""
    hooks = list(module._forward_pre_hooks.values())
    described = {hook._tensor_name: describe_hook(hook) for hook in hooks}
    assert len(described) == len(hooks)
    return described


def assert_same_tensor(what: str, ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype, f"{what}: dtype {ours.dtype}, torch has {theirs.dtype}"
    assert ours.requires_grad == theirs.requires_grad, what
    assert torch.equal(ours, theirs), f"{what}: {ours}, torch has {theirs}"


def assert_same_modules(ours: nn.Module, theirs: nn.Module) -> None:
    """State dicts, current weights, gradients and hooks are equal."""
    state, expected = ours.state_dict(), theirs.state_dict()
    assert sorted(state) == sorted(expected)
    for key in expected:
        assert_same_tensor(key, state[key], expected[key])
    assert distprune.is_pruned(ours) == torch_prune.is_pruned(theirs)
    twins = dict(theirs.named_modules())
    for path, module in ours.named_modules():
        assert described_hooks(module) == described_hooks(twins[path])
        for key in module._parameters:
            name = key.removesuffix("_orig")
            if module._parameters[key] is not None:
                assert_same_tensor(name, getattr(module, name), getattr(twins[path], name))
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        gradient = gradients.pop(name)
        assert (gradient is None) == (parameter.grad is None), f"gradient of {name}"
        if gradient is not None:
            assert_same_tensor(f"gradient of {name}", gradient, parameter.grad)
    assert not gradients


def raised_by(call: Callable[[], Any]) -> type[Exception] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


def on_both(ours: Callable[[], Any], theirs: Callable[[], Any], seed: int) -> type | None:
    """Call both from the same seed; they raise the same, and leave the generator in one state.

    Returns:
        What both raised, or None.
    """
    torch.manual_seed(seed)
    expected = raised_by(theirs)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    raised = raised_by(ours)
    assert raised is expected, f"{raised}, torch raises {expected}"
    if expected is None:
        assert torch.equal(torch.get_rng_state(), state), "torch has drawn other random numbers"
    return expected


def twin(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


# Pruned models with inputs for them, and how to train them.


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
    prune.global_unstructured(
        prune.select(model, everything=True), prune.L1Unstructured, amount=0.5
    )
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


def sparse_values_stay_zero(model: nn.Module) -> None:
    num_pruned = 0
    for name, mask in model.named_buffers():
        path, _, buffer = name.rpartition(".")
        value = getattr(model.get_submodule(path), buffer.removesuffix("_mask"))
        assert torch.equal(value[mask == 0], torch.zeros_like(value[mask == 0])), name
        num_pruned += int((mask == 0).sum())
    assert num_pruned > 0
