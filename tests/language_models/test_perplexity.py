"""Perplexity: against a plain loop, and the same bits on any number of ranks."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distprune.files.errors import TextError
from distprune.language_models import TokenWindows, losses, perplexity, read_windows
from distprune.testing import run_ranks
from helpers.collective_traffic import Traffic
from helpers.comparisons import raised
from helpers.sampling import every
from helpers.tiny_language_model import tiny_llama, tiny_tokenizer, write_text
from helpers.tiny_transformers import tiny_model
from helpers.wrapped_llamas import wrapped_llama
from helpers.wrappings import whole

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
    monkeypatch.setattr(losses.BatchLosses, "_run", lambda *_: (logits, None))
    measured = losses.BatchLosses(model).of_windows(windows.tokens[:1])
    assert float(measured) == pytest.approx(15 * float(exact), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", every(2, [1, 3], 1))
def test_bits_do_not_depend_on_the_number_of_ranks(folder, batch_size):
    expected, of_windows = run_ranks(evaluate, 1, "none", folder, batch_size)[0]
    for wrapping, size in [("ddp-2", 2), ("none", 2)]:
        for result in run_ranks(evaluate, size, wrapping, folder, batch_size):
            assert result == (expected, of_windows), wrapping
    # Gathered weights lie elsewhere in memory, and BLAS may choose another kernel by the address;
    # tensor-parallel ranks add up in another order.
    for wrapping, size in [("fsdp2-2", 2), ("fsdp2-4", 4), ("tp-2", 2), ("fsdp2_tp-2x2", 4)]:
        results = run_ranks(evaluate, size, wrapping, folder, batch_size)
        for values, found in results:
            assert (values, found) == results[0], wrapping
            assert found == pytest.approx(of_windows, rel=1e-6), wrapping
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
    return raised(lambda: perplexity(tiny_llama(), read(folder, limit=2 + dist.get_rank())))


def evaluate_broken_on_one_rank(folder):
    model = tiny_llama()
    if dist.get_rank():
        model.model.layers[0].mlp = None
    return raised(lambda: perplexity(model, read(folder, limit=2)))


@pytest.mark.slow
def test_ranks_that_differ_or_fail_raise_on_all(folder):
    for text in run_ranks(evaluate_other_windows, 2, folder):
        assert text.startswith("ValueError: ")
        assert "the ranks were called with different arguments" in text
    for text in run_ranks(evaluate_broken_on_one_rank, 2, folder):
        assert "TypeError: on rank 1: 'NoneType' object is not callable" in text


# Losses in slices: those of the model, without its logits.


IDS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))
TEXT = TokenWindows(("text",), IDS, torch.zeros(len(IDS), dtype=torch.int64), has_bos=False)
SLICED = ["llama", "gpt2", "gemma3", "mixtral", "qwen2"]
WHOLE = ["gemma2", "granitemoe", "bloom_with_hook"]


class Rows(TorchDispatchMode):
    """The most logits of a tensor that has its own memory, in positions.

    It refuses batches of products with a head: torch copies its weight for them.
    """

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.bmm.default or args[1].shape[-1] != 40
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


def both(model):
    """The mean loss and its gradients, and the losses of windows."""
    made = losses.BatchLosses(model)
    found = []
    for _ in range(2):  # the second batch is run in the way that the first one has shown
        model.zero_grad()
        loss = made.of_batch(TEXT, slice(0, len(IDS)))
        loss.backward()
        found.append((loss.detach(), gradients_of(model), made.of_windows(IDS)))
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
        loss, found, nll = both(model)
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
            loss_of_fixed, of_others, _ = both(model)
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
            loss = made.of_batch(TEXT, slice(0, len(IDS)))
            loss.backward()
    gradients = [whole(parameter.grad).clone() for parameter in model.parameters()]
    return loss.item(), made.of_windows(IDS), gradients, traffic.calls


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp2-2", "tp-2"])
def test_wrappers_gather_the_head_once(wrapping):
    expected = run_ranks(on_ranks, 2, wrapping, 1 << 24)
    found = run_ranks(on_ranks, 2, wrapping, 3 * 264)
    for (loss, nll, gradients, sent), of_whole in zip(found, expected, strict=True):
        assert loss == pytest.approx(of_whole[0], rel=1e-6)
        assert torch.allclose(nll, of_whole[1], rtol=1e-6)
        for gradient, right in zip(gradients, of_whole[2], strict=True):
            assert float((gradient - right).norm()) <= 1e-5 * float(right.norm())
        assert sent == of_whole[3]


# Text files as windows of tokens: which tokens, which bytes, and what is refused.


def test_windows_are_the_tokens_of_the_file_with_bos_in_front_of_each(tmp_path):
    path = write_text(tmp_path / "a.txt", 300)
    tokenizer = tiny_tokenizer()
    whole = path.read_text(encoding="utf-8")
    ids = tokenizer(whole, add_special_tokens=False).input_ids
    windows = read_windows(tokenizer, path, 16)
    count = len(ids) // 15
    assert windows.tokens.dtype == torch.int64 and windows.tokens.shape == (count, 16)
    assert windows.has_bos and (windows.tokens[:, 0] == 0).all()
    assert windows.tokens[:, 1:].reshape(-1).tolist() == ids[: count * 15]
    assert windows.texts == (str(path),) and windows.text_of.tolist() == [0] * count


def test_without_bos_the_first_token_of_a_window_is_not_predicted(tmp_path):
    path = write_text(tmp_path / "a.txt", 300)
    tokenizer = tiny_tokenizer(bos=False)
    ids = tokenizer(path.read_text(encoding="utf-8")).input_ids
    windows = read_windows(tokenizer, path, 16)
    assert not windows.has_bos and len(windows) == len(ids) // 16
    assert windows.tokens.reshape(-1).tolist() == ids[: len(windows) * 16]


def test_pieces_change_no_token(tmp_path, monkeypatch):
    path = write_text(tmp_path / "a.txt", 2000)
    tokenizer = tiny_tokenizer()
    whole = read_windows(tokenizer, path, 16)
    monkeypatch.setattr("distprune.language_models.text._PIECE", 100)
    for limit in (None, 5):
        pieces = read_windows(tokenizer, path, 16, limit=limit)
        assert torch.equal(pieces.tokens, whole.tokens[:limit])


def test_text_without_line_breaks_is_cut_at_spaces_or_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr("distprune.language_models.text._PIECE", 50)
    spaces, none = tmp_path / "spaces.txt", tmp_path / "none.txt"
    spaces.write_text("some words " * 40)
    none.write_text("x" * 400)
    tokenizer = tiny_tokenizer()
    for path in (spaces, none):
        windows = read_windows(tokenizer, path, 9)
        made = tokenizer.decode(windows.tokens[:, 1:].reshape(-1))
        assert path.read_text().startswith(made) and len(made) >= 390


def test_files_keep_their_order_and_a_limit_is_for_each(tmp_path):
    paths = [write_text(tmp_path / f"{n}.txt", 200, seed=n) for n in range(3)]
    windows = read_windows(tiny_tokenizer(), paths, 16, limit=4)
    assert windows.text_of.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    alone = read_windows(tiny_tokenizer(), paths[1], 16, limit=4)
    assert torch.equal(windows.tokens[4:8], alone.tokens)


def test_a_sample_is_drawn_by_its_seed(tmp_path):
    windows = read_windows(tiny_tokenizer(), write_text(tmp_path / "a.txt", 400), 8)
    some, again, other = (windows.sample(6, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(some.tokens, again.tokens) and not torch.equal(some.tokens, other.tokens)
    rows = [(windows.tokens == row).all(1).nonzero()[0] for row in some.tokens]
    assert rows == sorted(rows) and len(some) == 6
    assert torch.equal(windows.sample(len(windows)).tokens, windows.tokens)
    with pytest.raises(ValueError, match=f"10000 windows .* has {len(windows)}"):
        windows.sample(10000)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"text\.txt cannot be read as text in UTF-8: .*No such file"),
        (b"", r"text\.txt has 0 tokens; expected at least 15"),
        (b"short", r"text\.txt has 5 tokens; expected at least 15, one window of length=16"),
        (b"\xc3(" * 50, "cannot be read as text in UTF-8: .* byte 0xc3"),
    ],
)
def test_a_file_without_a_window_is_refused_by_name(tmp_path, content, expected):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=expected) as caught:
        read_windows(tiny_tokenizer(), path, 16)
    assert isinstance(caught.value, TextError)
    with pytest.raises(TextError, match=r"cannot be read as text in UTF-8: .*Is a directory"):
        read_windows(tiny_tokenizer(), tmp_path, 16)


def test_arguments_out_of_range(tmp_path):
    path, tokenizer = write_text(tmp_path / "a.txt", 100), tiny_tokenizer()
    with pytest.raises(ValueError, match="length=1, limit=None; expected at least"):
        read_windows(tokenizer, path, 1)
    with pytest.raises(ValueError, match="limit=0"):
        read_windows(tokenizer, path, 8, limit=0)
    with pytest.raises(ValueError, match="0 files"):
        read_windows(tokenizer, [], 8)


def read_own(path):
    files = [f"{path}/same.txt", f"{path}/{dist.get_rank()}.txt"]
    return raised(lambda: read_windows(tiny_tokenizer(), files, 8))


@pytest.mark.slow
def test_a_file_that_differs_or_fails_on_one_rank_raises_on_all(tmp_path):
    write_text(tmp_path / "same.txt", 50)
    for rank in range(2):
        write_text(tmp_path / f"{rank}.txt", 50, seed=rank)
    # The names differ too; what is compared first is named.
    for message in run_ranks(read_own, 2, tmp_path):
        assert message.startswith("ValueError: ") and "rank 0 has tokens of" in message
        assert "0.txt" in message and "1.txt" in message and "same.txt" not in message
    (tmp_path / "1.txt").unlink()
    for message in run_ranks(read_own, 2, tmp_path):
        assert message.startswith("RuntimeError: ") and "on rank 1: TextError" in message
