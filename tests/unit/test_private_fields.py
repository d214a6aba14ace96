"""The table of torch's private fields is true of this torch; what it lacks is named."""

import pytest

from distprune.testing import run_ranks
from distprune.wrappers import wrapper
from helpers import wrappings
from helpers.models import Net, seeded

FIELDS, NAMES = wrapper.FIELDS, wrapper.NAMES


def test_names_that_are_gone_are_named(monkeypatch):
    model = Net()
    assert wrapper.missing(model) == []
    monkeypatch.setitem(NAMES, "torch.no_such_module", "a")
    monkeypatch.setitem(NAMES, "torch.nn", "Linear NoSuchLayer.x Linear.no_such_field")
    assert wrapper.missing(model) == [
        "No module named 'torch.no_such_module'",
        "torch.nn.NoSuchLayer.x",
        "torch.nn.Linear.no_such_field",
    ]


def missing_of(wrapping: str, kind: str) -> list[list[str]]:
    """What a wrapped model is said to lack: with the table, and with one more name of a kind."""
    model = wrappings.wrap(seeded(Net()), wrapping)
    names, found = FIELDS[kind], [wrapper.missing(model)]
    FIELDS[kind] = names + " _of_tomorrow"
    try:
        return [*found, wrapper.missing(model)]
    finally:
        FIELDS[kind] = names


CASES = [
    ("ddp-2", "Module"),
    ("ddp-2", "DistributedDataParallel"),
    ("fsdp1-2", "FlatPiece"),
    ("fsdp2-2", "FSDP2Parameter"),
    ("fsdp2-2", "DTensor"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("wrapping", "kind"), CASES)
def test_a_field_that_is_gone_is_named(wrapping, kind):
    for with_table, with_more in run_ranks(missing_of, 2, wrapping, kind):
        assert (with_table, with_more) == ([], [f"{kind}._of_tomorrow"])
