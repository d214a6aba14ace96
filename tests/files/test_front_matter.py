"""Metadata of model cards keep their meaning and their order."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.files.reports.model_card import join_front_matter, split_front_matter, with_tags

CARD = b"""---
license: apache-2.0   # a comment
language:
- en
- "no"
tags:
  - llama
  - 'facebook'
extra_gated_prompt: |-
  You agree:

  # to this
  - and that
base_model: meta/Llama
model-index:
- name: x
  results:
  - task: {type: y}
widget:
- text: "a: b"
---

# Llama
"""


def edited(card, *tags):
    metadata, below = split_front_matter(card)
    text = join_front_matter(with_tags(metadata, tags))
    assert text.startswith("---\n") and text.endswith("---\n")
    assert split_front_matter(text.encode()) == (yaml.safe_load(text[4:-4]) or {}, b"")
    return yaml.safe_load(text[4:-4]), below


def test_a_card_keeps_its_metadata():
    before, below = split_front_matter(CARD)
    assert below == b"\n# Llama\n"
    assert before == yaml.safe_load(CARD.split(b"---\n")[1])
    after, _ = edited(CARD, "pruned", "sparse")
    assert list(after) == list(before)
    assert after.pop("tags") == [*before.pop("tags"), "pruned", "sparse"]
    assert after == before


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("tags:\n- a\n- b", ["a", "b", "pruned", "sparse"]),
        ("tags:\n    - a", ["a", "pruned", "sparse"]),
        ("tags: [a, b]", ["a", "b", "pruned", "sparse"]),
        ("tags: []", ["pruned", "sparse"]),
        ("tags: [pruned]", ["pruned", "sparse"]),
        ("tags:", ["pruned", "sparse"]),
        ("tags: null", ["pruned", "sparse"]),
        ("tags: a", ["a", "pruned", "sparse"]),
        ('"tags": [sparse, a]', ["sparse", "a", "pruned"]),
        ("tags:\n- sparse\n- 'pruned'", ["sparse", "pruned"]),
        ("license: mit", ["pruned", "sparse"]),
        ("", ["pruned", "sparse"]),
        ("tags: [a,\n  b]", ["a", "b", "pruned", "sparse"]),
        ("tags:\n- a\n# b\n- c", ["a", "c", "pruned", "sparse"]),
        ("tags: ['a, b']", ["a, b", "pruned", "sparse"]),
        ("tags:\n- a\n  b\n- c", ["a b", "c", "pruned", "sparse"]),
        ("tags: {a: b}", {"a": "b"}),  # what is no list stays as it is
        ("tags: 7", 7),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_form_of_tags(tags, wanted, newline):
    block = f"---\n{tags}\n---\ntext".replace("\n", newline).encode()
    after, below = edited(block, "pruned", "sparse")
    assert (after["tags"], below) == (wanted, b"text")


@pytest.mark.parametrize(
    "block",
    [
        "- a\n- b", "just text", "a: b\nnot a key", "%YAML 1.2", "a: !!int x", "a: !!python/none",
        "a: 2024-13-32", "a: " + "[" * 5000, "a: &a [b]\nc: *a", "a: &a {b: c}\n<<: [*a, *a]",
        "? [a]\n: b", "a: " + "x" * 300_000,
    ],
    ids=range(12),
)  # fmt: skip
def test_what_is_no_plain_mapping_is_text(block):
    card = f"---\n{block}\n---\ntext".encode()
    assert split_front_matter(card) == (None, card)


@pytest.mark.parametrize(
    "card", [b"", b"# Title\n", b"----\na: b\n----\n", b"---\na: b\n", b"---\na: \xff\n---\n"]
)
def test_no_metadata(card):
    assert split_front_matter(card) == (None, card)


WORDS = st.text("abcXYZ019 _-./:#'\"é\n", max_size=12)
VALUES = st.recursive(
    WORDS | st.none() | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"[a-z][a-z_-]{0,8}", fullmatch=True).filter(lambda key: key != "tags")


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(KEYS, VALUES, max_size=5),
    st.none() | st.lists(st.sampled_from(["a", "pruned", "x y", "no", "é"]), unique=True),
    st.sampled_from([None, False]),
    st.booleans(),
)
def test_whatever_yaml_writes_keeps_its_meaning(values, tags, style, is_ascii):
    before = values if tags is None else {**values, "tags": tags}
    text = yaml.safe_dump(
        json.loads(json.dumps(before)),  # without shared values, which would become aliases
        default_flow_style=style, allow_unicode=not is_ascii, width=20, sort_keys=False,
    )  # fmt: skip
    after, below = edited(f"---\n{text}---\nbelow".encode(), "pruned")
    assert below == b"below"
    assert after.pop("tags") == [*dict.fromkeys([*(tags or []), "pruned"])]
    before.pop("tags", None)
    assert after == before and list(after) == list(before)
