"""README.md of a result tells what was done, and nothing that is not so; verify derives it."""

import json

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import distprune
from distprune.files import planning, pruning, verifying
from distprune.files.recipe import FileRecipe
from distprune.files.reports import model_card
from distprune.recipe import parse_recipe
from helpers.sampling import num_examples
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


def prune(source, target, recipe=FileRecipe(0.5)):  # noqa: B008
    pruning.prune(planning.plan(source, recipe), target)
    found = (target / "README.md").read_bytes()
    assert verifying.verify(target, source).problems == ()
    return found


def metadata(card):
    values, below = model_card.split_front_matter(card)
    return values, below.decode()


def test_a_card_says_what_was_done(tmp_path):
    found = prune(source_of(tmp_path / "source"), tmp_path / "out")
    values, text = metadata(found)
    assert values == {
        "license": "llama3.2", "language": ["en", "de"], "tags": ["llama", "pruned", "sparse"],
        "base_model": "meta/Base", "base_model_relation": "finetune",
    }  # fmt: skip
    assert "exactly 64 of 128 weights, 50.00 %" in text
    assert "| `mlp.up_proj` | 2 | 64 | 32 | 50.00 % |" in text
    assert "4 pruned, 1 left as they were" in text
    assert "| largest magnitude that was pruned | 16.25 (2 of the 2 weights that have it) |" in text
    assert "magnitude, all selected tensors together" in text and "\nsparsity: 0.5\n" in text
    assert f"pruned by distprune {distprune.__version__}, and not trained" in text
    assert "nor the multiplication of dense matrices faster" in text and "distprune verify" in text
    assert found.endswith(CARD.partition("---\n# ")[2].encode())
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("place", "config", "wanted"),
    [
        ("models--org--Name-1.5/snapshots/0123abc", {"_name_or_path": "other/x"}, "org/Name-1.5"),
        ("models--gpt2/snapshots/0123abc", {}, "gpt2"),
        ("models--1/snapshots/0123abc", {}, "1"),
        ("source", {"_name_or_path": "meta-llama/Llama-3.2-1B"}, "meta-llama/Llama-3.2-1B"),
        ("source", {"_name_or_path": "/home/me/llama"}, None),
        ("source", {"_name_or_path": "./org/x"}, None),
        ("source", {"_name_or_path": "checkpoints/x"}, None),
        ("source", {"_name_or_path": "x"}, None),
        ("source", {"_name_or_path": "a/b\n- c"}, None),
        ("source", {"_name_or_path": 7}, None),
        ("source", {}, None),
    ],
)
def test_the_base_model_is_the_source(tmp_path, place, config, wanted):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    source = source_of(tmp_path / place, **config)
    found = prune(source, tmp_path / "out")
    values, text = metadata(found)
    assert values["base_model"] == (wanted or "meta/Base")
    assert ("base_model_relation" in values) is (wanted is None)
    assert (f"[{wanted}](https://huggingface.co/{wanted})" in text) is (wanted is not None)
    # Where the source lies does not decide what verify says.
    source.rename(tmp_path / "moved")
    assert verifying.verify(tmp_path / "out", tmp_path / "moved").problems == ()


@pytest.mark.parametrize(
    "card",
    [
        None, "", "# Only text\n", "---\nnot: [a\nmapping\n---\ntext\n",
        "---\na: 2024-13-32\n---\n",
    ],
)  # fmt: skip
def test_a_source_without_metadata(tmp_path, card):
    found = prune(source_of(tmp_path / "source", card), tmp_path / "out")
    assert metadata(found)[0] == {"tags": ["pruned", "sparse"]}
    assert found.endswith((card or "").encode()) and (b"card of the source" in found) is bool(card)


def test_a_card_in_any_encoding_is_kept(tmp_path):
    card = b"\xff\xfe\x00 no UTF-8\r\n"
    assert prune(source_of(tmp_path / "source", card), tmp_path / "out").endswith(card)


def test_names_of_tensors_are_no_markup(tmp_path):
    names = ["a|b`c\n# Title", "<script>alert(1)</script>", "\x1b[31m"]
    tensors = {f"layers.0.{name}.weight": torch.randn(4, 4) for name in names}
    text = prune(source_of(tmp_path / "source", None, tensors), tmp_path / "out").decode()
    assert "| `a\\|b'c\\n# Title` |" in text and "`<script>alert(1)</script>`" in text
    assert "\x1b" not in text and "\n# Title" not in text


@pytest.mark.parametrize(
    "recipe",
    [
        FileRecipe(0.3, "layer"), FileRecipe(0.5, "row"), FileRecipe(pattern="2:4", masks=False),
        FileRecipe(0.5, score="random", seed=3, include=("*up_proj*",)), FileRecipe(0.0),
    ],
)  # fmt: skip
def test_every_kind_of_recipe(tmp_path, recipe):
    source = source_of(tmp_path / "source")
    pruning.prune(planning.plan(source, recipe), tmp_path / "out")
    found = (tmp_path / "out" / "README.md").read_text()
    report = json.loads((tmp_path / "out" / "distprune" / "report.json").read_text())
    assert f"exactly {report['num_pruned']} of {report['num_elements']} weights" in found
    said = found.split("```yaml\n")[1].split("```")[0]
    assert said == (tmp_path / "out" / "distprune" / "recipe.yaml").read_text()
    read = parse_recipe(yaml.safe_load(said))
    for field in ("sparsity", "scope", "pattern", "score", "seed", "include"):
        assert getattr(read, field) == getattr(recipe, field)
    assert "magnitude that was pruned" in found or report["threshold"] is None


def test_no_card_copies_that_of_the_source(tmp_path):
    source = source_of(tmp_path / "source")
    assert prune(source, tmp_path / "out", FileRecipe(0.5, card=False)) == CARD.encode()
    bare = source_of(tmp_path / "bare", None)
    pruning.prune(planning.plan(bare, FileRecipe(0.5, card=False)), tmp_path / "plain")
    assert not (tmp_path / "plain" / "README.md").exists()


def test_what_can_be_no_card_is_copied(tmp_path, monkeypatch):
    source = source_of(tmp_path / "source", None)
    (source / "README.md").mkdir()
    (source / "README.md" / "a.txt").write_text("a")
    pruning.prune(planning.plan(source, FileRecipe(0.5)), tmp_path / "out")
    assert (tmp_path / "out" / "README.md" / "a.txt").read_text() == "a"
    monkeypatch.setattr(planning, "MAX_CARD_BYTES", len(CARD) - 1)
    large = source_of(tmp_path / "large")
    assert prune(large, tmp_path / "copy") == CARD.encode()


def test_a_result_pruned_again_has_one_card_over_the_other(tmp_path):
    source = source_of(tmp_path / "source")
    first = prune(source, tmp_path / "first")
    again = prune(tmp_path / "first", tmp_path / "second", FileRecipe(0.75))
    values, text = metadata(again)
    assert values["tags"] == ["llama", "pruned", "sparse"]
    assert "exactly 96 of 128" in text and text.endswith(metadata(first)[1].lstrip("\n"))


# Metadata


TAGS = ("pruned", "sparse")


def with_more_tags(card):
    """The metadata of a card with more tags, and the text below."""
    before, below = model_card.split_front_matter(card)
    text = model_card.join_front_matter(model_card.with_tags(before, TAGS))
    assert text.startswith("---\n") and text.endswith("---\n")
    assert model_card.split_front_matter(text.encode()) == (yaml.safe_load(text[4:-4]) or {}, b"")
    return yaml.safe_load(text[4:-4]), below


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("tags: [a, b]", ["a", "b", *TAGS]),
        ("tags: [pruned]", [*TAGS]),
        ("tags: null", [*TAGS]),
        ("tags: a", ["a", *TAGS]),
        ('"tags": [sparse, a]', ["sparse", "a", "pruned"]),
        ("", [*TAGS]),
        ("tags:\n- a\n# b\n- c", ["a", "c", *TAGS]),
        ("tags: {a: b}", {"a": "b"}),  # what is no list stays as it is
        ("tags: 7", 7),
    ],
)
def test_every_form_of_tags(tags, wanted):
    for newline in ("\n", "\r\n"):
        block = f"---\n{tags}\n---\ntext".replace("\n", newline).encode()
        after, below = with_more_tags(block)
        assert (after["tags"], below) == (wanted, b"text")


@pytest.mark.parametrize(
    "block",
    [
        "- a\n- b", "just text", "a: b\nnot a key", "%YAML 1.2", "a: !!int x", "a: !!python/none",
        "a: 2024-13-32", "a: " + "[" * 5000, "? [a]\n: b",
    ],
    ids=range(9),
)  # fmt: skip
def test_what_is_no_plain_mapping_is_text(block):
    card = f"---\n{block}\n---\ntext".encode()
    assert model_card.split_front_matter(card) == (None, card)


@pytest.mark.parametrize(
    "card", [b"", b"# Title\n", b"----\na: b\n----\n", b"---\na: b\n", b"---\na: \xff\n---\n"]
)
def test_no_metadata(card):
    assert model_card.split_front_matter(card) == (None, card)


WORDS = st.text("abcXYZ019 _-./:#'\"é\n", max_size=12)
VALUES = st.recursive(
    WORDS | st.none() | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"[a-z][a-z_-]{0,8}", fullmatch=True).filter(lambda key: key != "tags")


@settings(deadline=None, max_examples=num_examples(60))
@given(st.dictionaries(KEYS, VALUES, max_size=5), st.sampled_from([None, False]), st.booleans())
def test_metadata_keep_their_meaning_and_their_order(values, style, is_ascii):
    text = yaml.safe_dump(
        json.loads(json.dumps(values)),  # without shared values, which would become aliases
        default_flow_style=style, allow_unicode=not is_ascii, width=20, sort_keys=False,
    )  # fmt: skip
    after, below = with_more_tags(f"---\n{text}---\nbelow".encode())
    assert below == b"below" and after.pop("tags") == [*TAGS]
    assert after == values and list(after) == list(values)
