"""Metadata of model cards, edited as text, mean what a YAML parser reads."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distprune.files.formats import front_matter

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
    block, below = front_matter.split(card)
    parts = front_matter.parse(block)
    assert parts is not None
    text = front_matter.join(front_matter.with_tags(parts, tags))
    assert text.startswith("---\n") and text.endswith("\n---\n")
    return yaml.safe_load(text[4:-4]), below


def test_a_card_keeps_its_metadata():
    block, below = front_matter.split(CARD)
    assert below == b"\n# Llama\n"
    before = yaml.safe_load(block)
    after, _ = edited(CARD, "pruned", "sparse")
    assert after.pop("tags") == [*before.pop("tags"), "pruned", "sparse"]
    assert after == before
    parts = front_matter.without(front_matter.parse(block), ("model-index", "base_model"))
    left = yaml.safe_load(front_matter.join(parts)[4:-4])
    assert set(before) - set(left) == {"model-index", "base_model"}
    assert front_matter.value_of(front_matter.parse(block), "base_model") == "meta/Llama"


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
        ("tags: [a,\n  b]", ["a", "b"]),  # forms that are not known stay as they are
        ("tags:\n- a\n# b\n- c", ["a", "c"]),
        ("tags: ['a, b']", ["a, b"]),
        ("tags:\n- a\n  b\n- c", ["a b", "c"]),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_form_of_tags(tags, wanted, newline):
    block = f"---\n{tags}\n---\ntext".replace("\n", newline).encode()
    after, below = edited(block, "pruned", "sparse")
    assert (after["tags"], below) == (wanted, b"text")


@pytest.mark.parametrize(
    "block",
    ["{a: b}", "- a\n- b", "just text", "a: b\nnot a key", "a: 1\na: 2", "%YAML 1.2", "&x a: b"],
)
def test_what_is_no_plain_mapping_is_not_edited(block):
    assert front_matter.parse(block + "\n") is None


@pytest.mark.parametrize(
    "card", [b"", b"# Title\n", b"----\na: b\n----\n", b"---\na: b\n", b"---\na: \xff\n---\n"]
)
def test_no_metadata(card):
    assert front_matter.split(card) == (None, card)


WORDS = st.text("abcXYZ019 _-./:#'\"é\n", max_size=12)
VALUES = st.recursive(
    WORDS | st.none() | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"[a-z][a-z_-]{0,8}", fullmatch=True).filter(lambda key: key != "tags")


@given(
    st.dictionaries(KEYS, VALUES, max_size=5),
    st.none() | st.lists(st.sampled_from(["a", "pruned", "x y", "no", "é"]), unique=True),
    st.sampled_from([None, False]),
    st.booleans(),
)
def test_whatever_yaml_writes_keeps_its_meaning(values, tags, style, is_ascii):
    before = values if tags is None else {**values, "tags": tags}
    text = yaml.safe_dump(before, default_flow_style=style, allow_unicode=not is_ascii, width=20)
    block, below = front_matter.split(f"---\n{text}---\nbelow".encode())
    parts = front_matter.parse(block)
    if parts is None:
        return
    after, _ = edited(f"---\n{text}---\nbelow".encode(), "pruned")
    assert below == b"below"
    found = after.pop("tags")
    before.pop("tags", None)
    assert found in ([*dict.fromkeys([*(tags or []), "pruned"])], tags)
    assert after == before
