"""README.md of a result tells what was done, and nothing that is not so; verify derives it."""

import pytest
import torch

import distprune
from distprune.files import planning, pruning, verifying
from distprune.files import reports as model_card
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import save

CARD = """---
license: llama3.2
language: [en, de]
tags:
- llama
base_model: meta/Base
base_model_relation: finetune
model-index:
- name: x
  results: []
---
# Llama

The original *text*, with | and `code`.
"""
MADE = {
    "model.embed_tokens.weight": torch.ones(4, 8),
    **{
        f"model.layers.{i}.mlp.{kind}.weight": torch.arange(1.0, 33).reshape(4, 8) + i / 4
        for i in range(2)
        for kind in ("up_proj", "down_proj")
    },
}


def source_of(path, card=CARD, tensors=MADE, **config):
    source = save(path, tensors, config={"model_type": "tiny", **config})
    if card is not None:
        (source / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    return source


def prune(source, target, recipe=raw_recipe(0.5)):  # noqa: B008
    pruning.prune(planning.plan(source, recipe), target)
    found = (target / "README.md").read_bytes()
    assert verifying.verify(target, source).problems == ()
    return found


def metadata(card):
    values, below = model_card.split_front_matter(card)
    return values, below.decode(errors="replace")


def test_a_card_says_what_was_done(tmp_path):
    found = prune(source_of(tmp_path / "source"), tmp_path / "out")
    values, text = metadata(found)
    assert values == {
        "license": "llama3.2", "language": ["en", "de"], "tags": ["llama", "pruned", "sparse"],
        "base_model": "meta/Base", "base_model_relation": "finetune",
    }  # fmt: skip
    assert "exactly 64 of 128 selected weights (50.00 %)" in text
    assert f"distprune {distprune.__version__} pruned" in text and "not measured" in text
    assert "nor dense multiplication faster" in text and "distprune verify" in text
    said = text.split("```yaml\n")[1].split("```")[0]
    assert said == (tmp_path / "out" / "distprune" / "recipe.yaml").read_text()
    assert found.endswith(CARD.partition("---\n# ")[2].encode())
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("models--org--Name-1.5/snapshots/0123abc", "org/Name-1.5"),
        ("models--gpt2/snapshots/0123abc", "gpt2"),
        ("source", None),
    ],
)
def test_the_base_model_is_the_source(tmp_path, place, wanted):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    source = source_of(tmp_path / place)
    values, text = metadata(prune(source, tmp_path / "out"))
    assert values["base_model"] == (wanted or "meta/Base")
    assert ("base_model_relation" in values) is (wanted is None)
    assert (f"[{wanted}](https://huggingface.co/{wanted})" in text) is (wanted is not None)


def test_no_card_copies_that_of_the_source(tmp_path):
    source = source_of(tmp_path / "source")
    assert prune(source, tmp_path / "out", raw_recipe(0.5, card=False)) == CARD.encode()


def test_a_result_pruned_again_has_one_card_over_the_other(tmp_path):
    source = source_of(tmp_path / "source")
    first = prune(source, tmp_path / "first")
    again = prune(tmp_path / "first", tmp_path / "second", raw_recipe(0.75))
    values, text = metadata(again)
    assert values["tags"] == ["llama", "pruned", "sparse"]
    assert "exactly 96 of 128" in text and text.endswith(metadata(first)[1].lstrip("\n"))


@pytest.mark.parametrize(
    "card",
    [
        None, b"", b"# Only text\n", b"---\nnot: [a\nmapping\n---\ntext\n", b"---\n- 1\n---\n",
        b"---\na: 2024-13-32\n---\n", b"\xff\xfe\x00 no UTF-8\r\n",
    ],
)  # fmt: skip
def test_a_source_without_metadata(tmp_path, card):
    found = prune(source_of(tmp_path / "source", card), tmp_path / "out")
    assert metadata(found)[0] == {"tags": ["pruned", "sparse"]}
    assert found.endswith(card or b"") and (b"card of the source" in found) is bool(card)
