"""Masks are matched to parameters by name."""

from distprune._transformers import TransformersRules, match_masks


def test_without_rules_names_are_as_they_are():
    parameters = {"a": (2, 3), "b": (4,)}
    found = match_masks({"a": (2, 3), "b": (5,), "c": (1,)}, parameters, None, is_checkpoint=True)
    assert found.sources["a"].names == ("a",) and len(found.sources) == 1
    assert found.mismatched == {"b": "b has shape (4,); its mask has (5,)"}
    assert found.unexpected == {"c": ""}


class Swapped(TransformersRules):
    """Names of a checkpoint have a prefix less; and "x" and "y" change places."""

    def __init__(self):
        self._config, self._prefix, self._transforms = None, "m", [self]

    def rename_source_key(self, name):
        return {"x": "y", "y": "x"}.get(name, name), None


def test_names_of_a_model_come_before_the_rules_and_those_of_a_checkpoint_do_not():
    masks, parameters = {"x": (2,), "y": (2,)}, {"m.x": (2,), "m.y": (2,)}
    for is_checkpoint, expected in ((False, ["x", "y"]), (True, ["y", "x"])):
        found = match_masks(masks, parameters, Swapped(), is_checkpoint=is_checkpoint).sources
        assert [found[name].names for name in parameters] == [(name,) for name in expected]


def test_a_second_mask_for_a_parameter_is_told():
    masks = {"m.x": (2,), "x": (2,)}
    found = match_masks(masks, {"m.x": (2,)}, Swapped(), is_checkpoint=False)
    assert found.sources["m.x"].names == ("m.x",)
    assert found.unexpected == {"x": "m.x has the mask m.x"}
