"""Perplexity: against a plain loop, and the same bits on any number of ranks."""

import math

import pytest
import torch
from torch import nn

from distprune.language_models import losses, perplexity, read_windows
from distprune.testing import run_ranks
from helpers.sampling import every
from helpers.tiny_language_model import tiny_llama, tiny_tokenizer, write_text
from helpers.wrapped_llamas import wrapped_llama

pytest.importorskip("transformers")


def read(folder, length=16, limit=None):
    files = sorted(folder.glob("*.txt"))
    return read_windows(tiny_tokenizer(), files, length, limit=limit)


def evaluate(wrapping, folder, batch_size):
    torch.set_num_threads(1)
    seen = []
    model = wrapped_llama(tiny_llama(), wrapping)
    windows = read(folder, limit=7).sample(7)
    report = perplexity(model, windows, batch_size=batch_size, progress=seen.append)
    assert seen[-1].num_done == seen[-1].total == 14
    assert [state.num_done for state in seen] == sorted({s.num_done for s in seen})
    return report.as_values(), report.window_nll.tolist()


@pytest.fixture
def folder(tmp_path):
    for number in range(2):
        write_text(tmp_path / f"{number}.txt", 200, seed=number)
    return tmp_path


def test_it_is_that_of_a_plain_loop_over_windows(folder):
    model, windows = tiny_llama(), read(folder, limit=3)
    report = perplexity(model, windows)
    losses = []
    with torch.no_grad():
        for row in windows.tokens:
            chances = model(row[None]).logits[0].double().log_softmax(-1)
            losses.append(-float(chances[:-1].gather(1, row[1:, None]).sum()))
    assert report.window_nll.tolist() == pytest.approx(losses, rel=1e-6)
    assert report.total.nll == pytest.approx(sum(losses), rel=1e-6)
    assert report.perplexity == pytest.approx(math.exp(sum(losses) / 90), rel=1e-6)
    first, second = report.texts
    assert first.num_windows == second.num_windows == 3 and first.num_tokens == 45
    assert first.nll == pytest.approx(sum(losses[:3]), rel=1e-6)


def test_slices_of_logits_and_half_precision(folder, monkeypatch):
    model, windows = tiny_llama(), read(folder, limit=4)
    whole = perplexity(model, windows)
    monkeypatch.setattr(losses, "SLICE", 264 * 4)
    assert perplexity(model, windows).total.nll == pytest.approx(whole.total.nll, rel=1e-6)
    # Logits of 8 bits are converted before the loss, not after.
    logits = torch.randn(1, 16, 264).bfloat16()
    exact = torch.nn.functional.cross_entropy(logits[0, :-1].double(), windows.tokens[0, 1:])
    measured = losses.nll_of_windows(logits, windows.tokens[:1])
    assert float(measured) == pytest.approx(15 * float(exact), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", every(2, [1, 3], 1))
def test_bits_do_not_depend_on_the_number_of_ranks(folder, batch_size):
    expected, of_windows = run_ranks(evaluate, 1, "none", folder, batch_size)[0]
    for wrapping, size in [("ddp-2", 2), ("none", 2)]:
        for result in run_ranks(evaluate, size, wrapping, folder, batch_size):
            assert result == (expected, of_windows), wrapping
    # Gathered weights lie elsewhere in memory, and BLAS may choose another kernel by the address.
    for wrapping, size in [("fsdp2-2", 2), ("fsdp2-4", 4)]:
        results = run_ranks(evaluate, size, wrapping, folder, batch_size)
        for values, found in results:
            assert (values, found) == results[0], wrapping
            assert found == pytest.approx(of_windows, rel=1e-6), wrapping
            assert values["all"]["num_tokens"] == expected["all"]["num_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ["tp-2", "fsdp2_tp-2x2"])
def test_tensor_parallel_ranks_compute_together(folder, wrapping):
    expected, of_windows = run_ranks(evaluate, 1, "none", folder, 1)[0]
    results = run_ranks(evaluate, 4 if "x" in wrapping else 2, wrapping, folder, 1)
    for values, found in results:
        assert (values, found) == results[0]
        assert found == pytest.approx(of_windows, rel=1e-6)
        assert values["all"]["num_tokens"] == expected["all"]["num_tokens"]


def test_the_model_is_left_as_it_was(folder):
    model = tiny_llama().train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    perplexity(model, read(folder, limit=1))
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_named_by_text_and_window(folder, value):
    model, windows = tiny_llama(), read(folder, limit=3)
    windows.tokens[4, 5] = 263
    windows.tokens[:4][windows.tokens[:4] == 263] = 5
    model.model.embed_tokens.weight.data[263] = value
    with pytest.raises(ValueError, match=r"window 1 of .*1\.txt has a loss of nan, and 1 of 6"):
        perplexity(model, windows)


def test_what_the_model_does_not_have_is_refused_before_it_runs(folder):
    windows = read(folder, length=16, limit=2)
    with pytest.raises(ValueError, match=r"the token \d+, and the model has 100 tokens"):
        perplexity(tiny_llama(vocab_size=100), windows)
    with pytest.raises(ValueError, match="16 tokens, and the model has 8 positions"):
        perplexity(tiny_llama(max_position_embeddings=8), windows)
    with pytest.raises(ValueError, match="batch_size=0"):
        perplexity(tiny_llama(), windows, batch_size=0)
    with pytest.raises(TypeError, match="returns a Tensor; expected logits"):
        perplexity(Flat(), windows)


class Flat(nn.Module):
    def forward(self, input_ids):
        return torch.zeros(len(input_ids))


def evaluate_other_windows(folder):
    import torch.distributed as dist

    try:
        perplexity(tiny_llama(), read(folder, limit=2 + dist.get_rank()))
    except ValueError as error:
        return str(error)


def evaluate_broken_on_one_rank(folder):
    import torch.distributed as dist

    model = tiny_llama()
    if dist.get_rank():
        model.model.layers[0].mlp = None
    try:
        perplexity(model, read(folder, limit=2))
    except TypeError as error:
        return str(error)


@pytest.mark.slow
def test_ranks_that_differ_or_fail_raise_on_all(folder):
    for text in run_ranks(evaluate_other_windows, 2, folder):
        assert "the ranks were called with different arguments" in text
    for text in run_ranks(evaluate_broken_on_one_rank, 2, folder):
        assert "on rank 1: 'NoneType' object is not callable" in text
