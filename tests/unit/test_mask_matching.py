"""Mask names without a parameter: the message, and its cost."""

import time

from distprune._transformers.loading import match_masks, with_close_names


def test_names_that_differ_in_their_numbers_are_of_one_kind():
    known = [f"model.layers.{i}.mlp.{name}.weight" for i in range(12) for name in ("up", "down")]
    shown = with_close_names(["layers.11.mlp.up.weight", "layers.12.mlp.down.weight", "x"], known)
    assert shown.splitlines() == [
        "  layers.11.mlp.up.weight (there is model.layers.11.mlp.up.weight)",
        "  layers.12.mlp.down.weight (there is model.layers.0.mlp.down.weight)",
        "  x",
    ]


def test_every_name_is_shown_up_to_two_hundred():
    lines = with_close_names([f"a{i}" for i in range(250)], []).splitlines()
    assert len(lines) == 201 and lines[-1] == "  and 50 more" and lines[199] == "  a199"


def test_fifty_thousand_names_take_no_minutes():
    known = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
        for layer in range(60)
        for expert in range(256)
        for name in ("gate", "up", "down")
    ]
    begun = time.process_time()
    with_close_names([name.replace("mlp", "moe") for name in known], known)
    assert time.process_time() - begun < 20  # a comparison with each name took 144


def test_without_rules_names_are_as_they_are():
    parameters = {"a": (2, 3), "b": (4,)}
    found = match_masks({"a": (2, 3), "b": (5,), "c": (1,)}, parameters, None, is_checkpoint=True)
    assert found.sources["a"].names == ("a",) and len(found.sources) == 1
    assert found.mismatched == {"b": "b has shape (4,); its mask has (5,)"}
    assert found.unexpected == {"c": ""}


class Prefix:
    """Names of a checkpoint have a prefix less; and "x" and "y" change places."""

    def match(self, masks, parameters, others):
        found = match_masks({}, parameters, None, is_checkpoint=True)
        for name, shape in masks.items():
            other = {"x": "m.y", "y": "m.x"}.get(name, f"m.{name}")
            found.add(name, shape, other, parameters[other])
        return found

    def with_other_prefix(self, name, parameters):
        return f"m.{name}" if f"m.{name}" in parameters else None


def test_names_of_a_model_come_before_the_rules_and_those_of_a_checkpoint_do_not():
    parameters = {"m.x": (2,), "m.y": (2,)}
    masks = {"x": (2,), "y": (2,)}
    of_model = match_masks(masks, parameters, Prefix(), is_checkpoint=False)
    assert {name: source.names for name, source in of_model.sources.items()} == {
        "m.x": ("x",),
        "m.y": ("y",),
    }
    of_checkpoint = match_masks(masks, parameters, Prefix(), is_checkpoint=True)
    assert {name: source.names for name, source in of_checkpoint.sources.items()} == {
        "m.y": ("x",),
        "m.x": ("y",),
    }


def test_a_second_mask_for_a_parameter_is_told():
    parameters = {"m.x": (2,)}
    found = match_masks({"m.x": (2,), "x": (2,)}, parameters, Prefix(), is_checkpoint=False)
    assert found.sources["m.x"].names == ("m.x",)
    assert found.unexpected == {"x": "m.x has the mask m.x"}
