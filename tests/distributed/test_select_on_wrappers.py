"""select() names and orders the parameters as in the unwrapped model, whatever wraps it."""

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import distprune as prune
import wraps
from harness import run_ranks
from models import ShapesNet, fill

WRAPPINGS = ["plain-2", "ddp-2", "fsdp2-2", "fsdp2_root-2", "tp-2", "fsdp2_tp-2x2"]
SELECTIONS = {
    "all": {},
    "excluded": {"exclude": ["l2", "one.*"]},
    "included": {"include": ["l*"]},
    "pattern": {"include": ["re:l[13].*"]},
}


def selected(wrapping: str, arguments: dict, pruned: bool, checkpointed: bool) -> list[str]:
    model = fill(ShapesNet(), "normal", "float32")
    if checkpointed:
        model.l3 = checkpoint_wrapper(model.l3)
    model = wraps.wrap(model, wrapping)
    pairs = prune.select(model, **arguments)
    if pruned:
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
        pairs = prune.select(model, **arguments)
    for pair in pairs:
        module, name = pair
        path, _, expected_name = pair.fqn.rpartition(".")
        assert name == expected_name
        assert getattr(module, name).shape == getattr(ShapesNet().get_submodule(path), name).shape
    return [pair.fqn for pair in pairs]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_names_do_not_depend_on_the_wrapper(wrapping, selection, pruned, checkpointed):
    arguments = SELECTIONS[selection]
    expected = {
        "all": ["l1.weight", "l2.weight", "l3.weight", "conv.weight", "one.weight"],
        "excluded": ["l1.weight", "l3.weight", "conv.weight"],
        "included": ["l1.weight", "l2.weight", "l3.weight"],
        "pattern": ["l1.weight", "l3.weight"],
    }[selection]
    size = wraps.world_size(wrapping)
    assert run_ranks(selected, size, wrapping, arguments, pruned, checkpointed) == [expected] * size


def unmatched(wrapping: str) -> str:
    model = wraps.wrap(fill(ShapesNet(), "normal", "float32"), wrapping)
    try:
        prune.select(model, exclude=["l1", "lm_head"])
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp2-2"])
def test_a_pattern_that_matches_nothing_is_an_error(wrapping):
    for text in run_ranks(unmatched, 2, wrapping):
        assert "lm_head" in text
