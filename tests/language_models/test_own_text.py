"""Text that a model writes itself: its distribution, windows drawn again, and the same on ranks."""

import pytest
import torch
from torch.nn import functional

from distprune import language_models
from distprune.files.errors import TextError
from distprune.language_models import writing
from distprune.testing import run_ranks
from helpers.tiny_language_model import tiny_llama, tiny_tokenizer

TEMPLATE = "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}</s>{% endfor %}"


def written(folder, wrap="none", windows=5, batch_size=2):
    model = language_models.load_sharded(folder / "llama", wrap=wrap)
    tokenizer = language_models.load_tokenizer(folder / "llama")
    made = language_models.write_text(
        model, tokenizer, windows=windows, length=12, batch_size=batch_size
    )
    assert not any(module.training for module in model.modules())
    return made.tokens


def test_tokens_are_extendd_from_what_the_model_predicts():
    """Each token is where its random number lies in the distribution that a whole forward gives."""
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    num_run, forward = [], model.model.forward
    model.model.forward = lambda **k: num_run.append(k["input_ids"].shape[1]) or forward(**k)
    made = language_models.write_text(model, tokenizer, windows=3, length=9, seed=1)
    assert num_run == [1] * 8  # earlier tokens are in a cache
    assert made.has_bos and made.texts == ("own text",)
    for number, row in enumerate(made.tokens):
        chances = writing._random(1, number, 0, 9)
        with torch.no_grad():
            logits = model(input_ids=row[None]).logits[0].double()
        for position in range(1, 9):
            share = functional.softmax(logits[position - 1], -1).cumsum(-1)
            token = int(row[position])
            below = float(share[token - 1]) if token else 0.0
            assert below - 1e-6 <= chances[position] <= float(share[token]) + 1e-6


def test_more_windows_begin_with_the_same_ones(llama_and_text):
    few, many = written(llama_and_text, windows=3), written(llama_and_text, windows=5, batch_size=5)
    assert torch.equal(few, many[:3]) and not torch.equal(many[3], many[4])


@pytest.fixture(scope="module")
def written_alone(llama_and_text):
    return written(llama_and_text)


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "num_ranks"), [("none", 3), ("ddp", 2), ("fsdp2", 2), ("tp", 2)])
def test_ranks_write_what_one_process_writes(llama_and_text, written_alone, wrap, num_ranks):
    for tokens in run_ranks(written, num_ranks, llama_and_text, wrap):
        assert torch.equal(tokens, written_alone)


def test_windows_that_repeat_themselves_are_drawn_again(monkeypatch):
    """A model that nearly always repeats one token, and one that always does."""
    model, tokenizer, draws = tiny_llama(), tiny_tokenizer(), []
    sample = writing._extend

    def noted(model, known, first, choose):
        draws.append(len(known))
        return torch.full_like(known, 7) if len(draws) < 3 else sample(model, known, first, choose)

    monkeypatch.setattr(writing, "_extend", noted)
    made = language_models.write_text(model, tokenizer, windows=2, length=40)
    assert draws == [2, 2, 2] and not (made.tokens == 7).all(dim=1).any()
    monkeypatch.setattr(writing, "_extend", lambda model, known, *_: torch.full_like(known, 7))
    assert bool(
        (language_models.write_text(model, tokenizer, windows=2, length=9).tokens == 7).all()
    )


def test_every_second_window_goes_through_the_chat_template():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    question = tokenizer("<s>[user] ", add_special_tokens=False)["input_ids"]
    made = language_models.write_text(model, tokenizer, windows=4, length=20).tokens.tolist()
    begins = [row[: len(question)] == question for row in made]
    assert begins == [False, True, False, True] and made[1] != made[3]


def test_errors_name_what_is_wrong():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    with pytest.raises(ValueError, match="positions"):
        language_models.write_text(model, tokenizer, length=65)
    with pytest.raises(ValueError, match="0 windows of length=16"):
        language_models.write_text(model, tokenizer, windows=0, length=16)
    model.lm_head.weight.data[:] = torch.nan
    with pytest.raises(ValueError, match="logits of token 1 are not finite"):
        language_models.write_text(model, tokenizer, windows=1, length=4)
    tokenizer.bos_token = tokenizer.eos_token = None
    model.config.bos_token_id = None
    with pytest.raises(ValueError, match="neither bos_token nor eos_token"):
        language_models.write_text(model, tokenizer, windows=1, length=4)


def test_saved_windows_are_a_text(llama_and_text, tmp_path):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    made = language_models.write_text(model, tokenizer, windows=4, length=9)
    made.save(file := tmp_path / "own.safetensors")
    files = [llama_and_text / "text.txt", file]
    both = language_models.read_windows(tokenizer, files, 9)
    assert both.has_bos and torch.equal(both.tokens[both.text_of == 1], made.tokens)
    of_each = both.sample(3)
    assert of_each.text_of.tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"5 windows of each text are .*own.safetensors has 4"):
        both.sample(5)
    with pytest.raises(TextError, match=r"own.safetensors has windows \[4, 9\]; expected length=8"):
        language_models.read_windows(tokenizer, file, 8)
    (tmp_path / "other.safetensors").write_text("no")
    with pytest.raises(TextError, match="cannot be read as windows"):
        language_models.read_windows(tokenizer, tmp_path / "other.safetensors", 9)
