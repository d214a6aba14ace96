"""The table of torch's private fields is true of this torch; what it lacks is named."""

import pytest
import torch

from distprune.testing import run_ranks
from distprune.wrappers import private_fields
from distprune.wrappers.wrapper import managed_parameters
from helpers import wrappings
from helpers.models import Net, seeded

FIELDS, NAMES = private_fields.FIELDS, private_fields.NAMES


@pytest.mark.parametrize("wrapper", NAMES)
def test_every_name_can_be_imported(wrapper):
    assert private_fields.missing_names(wrapper) == []


def test_names_that_are_gone_are_named(monkeypatch):
    gone = {"torch.no_such_module": ("a",), "torch.nn": ("Linear", "NoSuchLayer.x")}
    monkeypatch.setitem(NAMES, "FSDP2", gone)
    assert private_fields.missing_names("FSDP2") == [
        "torch.no_such_module",
        "torch.nn.NoSuchLayer.x",
    ]


def test_one_of_two_names_will_do(monkeypatch):
    monkeypatch.setitem(FIELDS, "Module", {"Module": ("gone or training", "gone or lost")})
    missing = private_fields.missing_fields("Module", {"Module": torch.nn.Linear(1, 1)})
    assert missing == ["Module.gone or lost"]


def refusals(wrapping: str, wrapper: str) -> list[str]:
    """Per object of a wrapper: all fields are there; and what is said when one is not."""
    found = []
    for kind, names in FIELDS[wrapper].items():
        model = wrappings.wrap(seeded(Net()), wrapping)
        for managed in managed_parameters(model).values():
            managed.check_fields()
        if kind == "FSDPState":
            assert private_fields.missing("FSDP2", model) == []
            continue
        FIELDS[wrapper][kind] = (*names, "_renamed")
        try:
            for managed in managed_parameters(model).values():
                managed.check_fields()
            found.append("nothing was refused")
        except NotImplementedError as error:
            found.append(str(error))
        FIELDS[wrapper][kind] = names
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("wrapping", "wrapper"), [("fsdp2-2", "FSDP2"), ("fsdp1-2", "FSDP1")])
def test_a_field_that_is_gone_is_refused_by_name(wrapping, wrapper):
    kinds = [kind for kind in FIELDS[wrapper] if kind != "FSDPState"]
    for messages in run_ranks(refusals, 2, wrapping, wrapper):
        assert len(messages) == len(kinds)
        for kind, message in zip(kinds, messages, strict=True):
            assert f"changed {wrapper}'s {kind}._renamed" in message
            assert "torch 2.11 to 2.15" in message
