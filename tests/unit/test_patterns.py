"""A pattern matches the whole name of a parameter or of its module; live models and files agree."""

import pytest

from distprune.base.selecting import matcher

NAME = "layers.0.mlp.weight"


@pytest.mark.parametrize(
    "pattern",
    ["*", "layers.*", "layers.0.mlp", NAME, "*.weight", "layers.[01].*", "?ayers.0.mlp.weight"]
    + ["re:layers\\.\\d+\\.mlp", "re:.*weight", "re:layers.0.mlp.weight"],
)
def test_a_whole_name_matches(pattern):
    assert matcher(pattern)(NAME)


@pytest.mark.parametrize(
    "pattern",
    ["layers", "layers.0", "mlp", "weight", "0.mlp.weight", "Layers.*", "layers.?", "", "re:layers"]
    + ["re:", "re:mlp.weight", "re:LAYERS.*", "re: .*"],
)
def test_a_part_of_a_name_does_not(pattern):
    assert not matcher(pattern)(NAME)


def test_a_parameter_of_the_root_has_a_module_without_a_name():
    assert matcher("weight")("weight")
    assert matcher("*")("weight")
    assert not matcher("*.weight")("weight")


@pytest.mark.parametrize("pattern", ["re:(", "re:[", "re:*", "re:" + "(" * 10_000])
def test_what_is_no_expression_is_refused(pattern):
    with pytest.raises(ValueError):
        matcher(pattern)


@pytest.mark.parametrize("pattern", ["(", "[", "re:", "re:(a|b)*", ""])
def test_what_is_one_is_not(pattern):
    matcher(pattern)
