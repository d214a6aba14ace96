"""select() names and orders the parameters as in the unwrapped model, whatever wraps it."""

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.models import ShapesNet, fill

WRAPPINGS = ["plain-2", "ddp-2", "fsdp2-2", "fsdp2_root-2", "tp-2", "fsdp2_tp-2x2"]
SELECTIONS = {  # arguments, and the names that they select
    "default": ({}, ["l1.weight", "l2.weight", "l3.weight", "conv.weight"]),
    "everything": (
        {"everything": True}, ["l1.weight", "l2.weight", "l3.weight", "conv.weight", "one.weight"],
    ),
    "vectors": (
        {"include": "l[12].*", "min_ndim": 1}, ["l1.bias", "l1.weight", "l2.bias", "l2.weight"],
    ),
    "excluded": ({"exclude": ["l2", "one.*"]}, ["l1.weight", "l3.weight", "conv.weight"]),
    "included": ({"include": ["l*"]}, ["l1.weight", "l2.weight", "l3.weight"]),
    "pattern": ({"include": ["re:l[13].*"]}, ["l1.weight", "l3.weight"]),
}  # fmt: skip


def selected(wrapping: str, checkpointed: bool) -> dict[tuple[str, bool], list[str]]:
    """Names by selection, and by whether the model is pruned at the time."""
    model = fill(ShapesNet(), "normal", "float32")
    if checkpointed:
        model.l3 = checkpoint_wrapper(model.l3)
    model = wrappings.wrap(model, wrapping)
    found = {}
    for pruned in (False, True):
        for selection, (arguments, _) in SELECTIONS.items():
            pairs = prune.select(model, **arguments)
            found[selection, pruned] = [pair.fqn for pair in pairs]
            for module, name in pairs:
                getattr(module, name)
        prune.global_unstructured(
            prune.select(model, everything=True), prune.L1Unstructured, amount=0.5
        )
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_names_do_not_depend_on_the_wrapper(wrapping, checkpointed):
    expected = {(s, pruned): names for s, (_, names) in SELECTIONS.items() for pruned in (0, 1)}
    for found in run_ranks(selected, wrappings.world_size(wrapping), wrapping, checkpointed):
        assert found == expected
