"""Masks are matched to parameters by name."""

from distprune._transformers.conversions import match_masks


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
