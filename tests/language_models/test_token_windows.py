"""Text files as windows of tokens: which tokens, which bytes, and what is refused."""

import pytest
import torch

from distprune.files.errors import TextError
from distprune.language_models import read_windows, text
from distprune.testing import run_ranks
from helpers.tiny_language_model import tiny_tokenizer, write_text

pytest.importorskip("transformers")


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


def test_pieces_and_a_limit_change_no_token(tmp_path, monkeypatch):
    path = write_text(tmp_path / "a.txt", 2000)
    tokenizer = tiny_tokenizer()
    whole = read_windows(tokenizer, path, 16)
    monkeypatch.setattr(text, "_PIECE", 100)
    pieces = read_windows(tokenizer, path, 16)
    assert torch.equal(pieces.tokens, whole.tokens)
    limited = read_windows(tokenizer, path, 16, limit=5)
    assert torch.equal(limited.tokens, whole.tokens[:5])


def test_text_without_line_breaks_is_cut_at_spaces_or_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_PIECE", 50)
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
    import torch.distributed as dist

    try:
        read_windows(tiny_tokenizer(), [f"{path}/same.txt", f"{path}/{dist.get_rank()}.txt"], 8)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
def test_a_file_that_differs_or_fails_on_one_rank_raises_on_all(tmp_path):
    write_text(tmp_path / "same.txt", 50)
    for rank in range(2):
        write_text(tmp_path / f"{rank}.txt", 50, seed=rank)
    # The names differ too; what is compared first is named.
    for kind, message in run_ranks(read_own, 2, tmp_path):
        assert kind == "ValueError" and "rank 0 has tokens of" in message
        assert "0.txt" in message and "1.txt" in message and "same.txt" not in message
    (tmp_path / "1.txt").unlink()
    for kind, message in run_ranks(read_own, 2, tmp_path):
        assert kind == "RuntimeError" and "on rank 1: TextError" in message
