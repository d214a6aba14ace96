"""Losses in slices: those of the model, without its logits."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distprune.language_models import losses
from distprune.testing import run_ranks
from helpers.collective_traffic import Traffic
from helpers.tiny_language_model import tiny_llama
from helpers.tiny_transformers import tiny_model
from helpers.wrapped_llamas import wrapped_llama

pytest.importorskip("transformers")

IDS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))
SLICED = ["llama", "gpt2", "gemma3", "mixtral", "qwen2"]
WHOLE = ["gemma2", "granitemoe", "bloom_with_hook"]


class Rows(TorchDispatchMode):
    """The most logits of a tensor that has its own memory, in positions."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            is_tensor = isinstance(tensor, torch.Tensor) and tensor.ndim > 0
            if is_tensor and tensor.shape[-1] == 40 and tensor.is_contiguous():
                self.most = max(self.most, tensor.numel() // 40)
        return made


def model_of(family):
    if family == "bloom_with_hook":
        model = tiny_model("bloom")
        model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
        return model
    return tiny_model(family)


def both(model, ids):
    """The mean loss and its gradients, and the losses of windows."""
    made = losses.BatchLosses(model)
    found = []
    for _ in range(2):  # the second batch is run in the way that the first one has shown
        model.zero_grad()
        loss = made.mean(ids)
        loss.backward()
        with torch.no_grad():
            found.append((loss.detach(), gradients_of(model), made.of_windows(ids)))
    assert str(found[0]) == str(found[1])
    return found[0]


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", SLICED + WHOLE)
def test_they_are_the_models_own(family, monkeypatch):
    model = model_of(family)
    before = copy.deepcopy(vars(model.lm_head)), [*vars(model)]
    model.zero_grad()
    expected = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    expected.backward()
    gradients = gradients_of(model)
    with torch.no_grad():
        chances = model(input_ids=IDS, use_cache=False).logits.double().log_softmax(-1)
    of_windows = -chances[:, :-1].gather(2, IDS[:, 1:, None]).sum((1, 2))

    monkeypatch.setattr(losses, "SLICE", 3 * 40)
    with Rows() as rows:
        loss, found, nll = both(model, IDS)
    if family in WHOLE:
        assert rows.most >= 16
    else:
        assert rows.most == 3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(nll, of_windows, rtol=1e-5)
    assert found.keys() == gradients.keys()
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():  # CPUs differ in the order of their sums
        assert float((found[name] - gradient).norm()) <= 1e-5 * largest, name
    assert [*vars(model)] == before[1] and vars(model.lm_head).keys() == before[0].keys()

    if family in SLICED:  # a head without a gradient is not run again in the backward
        model.lm_head.requires_grad_(False)
        with Rows() as rows:
            loss_of_fixed, of_others, _ = both(model, IDS)
        assert rows.most == 3 and loss_of_fixed.equal(loss)
        others = {name: found[name] for name, p in model.named_parameters() if p.requires_grad}
        assert of_others.keys() == others.keys() and len(others) > 2
        for name, gradient in others.items():
            assert torch.allclose(of_others[name], gradient, rtol=1e-5, atol=1e-7), name


def on_ranks(wrapping, size):
    torch.set_num_threads(1)
    model = wrapped_llama(tiny_llama(), wrapping)
    losses.SLICE = size
    made = losses.BatchLosses(model)
    with Traffic() as traffic:
        for _ in range(2):
            loss = made.mean(IDS)
            loss.backward()
    gradients = {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in model.named_parameters()
    }
    with torch.no_grad():
        nll = made.of_windows(IDS)
    return loss.item(), nll, list(gradients.values()), traffic.calls


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp2-2", "tp-2"])
def test_wrappers_gather_the_head_once(wrapping):
    expected = run_ranks(on_ranks, 2, wrapping, 1 << 24)
    found = run_ranks(on_ranks, 2, wrapping, 3 * 264)
    for (loss, nll, gradients, sent), of_whole in zip(found, expected, strict=True):
        assert loss == pytest.approx(of_whole[0], rel=1e-6)
        assert torch.allclose(nll, of_whole[1], rtol=1e-6)
        for gradient, whole in zip(gradients, of_whole[2], strict=True):
            assert float((gradient - whole).norm()) <= 1e-5 * float(whole.norm())
        assert sent == of_whole[3]
