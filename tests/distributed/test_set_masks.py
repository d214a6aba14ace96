"""Masks that shrink and grow, on every wrapping: values, optimizer state, records, checkpoints."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import distprune as prune
from distprune import checkpoint
from distprune.base.naming import unwrap
from distprune.masks.hook import find_hook
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import wrappings
from helpers.comparisons import (
    assert_nothing_wrong_on,
    changes,
    snapshot,
    wrong_masks,
)

WEIGHTS = runs.WEIGHTS


def random_masks(dense: nn.Module, seed: int, share: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(dense.get_parameter(name).shape, generator=generator) < share
        for name in WEIGHTS
    }


def states(optimizer, model, name: str, indices) -> dict[str, Tensor]:
    """This rank's part of an optimizer's state of a parameter, and its step."""
    path, _, parameter = name.rpartition(".")
    module = wrappings.unwrapped(model).get_submodule(path)
    if wrappings.kept_by_name(module):
        trained = wrappings.stored(unwrap(module), parameter)
        state = optimizer.state.get(trained, {})
        return {key: wrappings.local(value).clone() for key, value in state.items()}
    state = optimizer.state.get(module._handle.flat_param, {})
    return {
        key: value.clone()
        if value.ndim == 0
        else wrappings._piece_of_flat(value, name, indices).clone()
        for key, value in state.items()
    }


class Case:
    """A model with integer weights, masked, whose optimizer has made two steps of length 0."""

    def __init__(self, wrapping: str, kind: str = "adam"):
        self.wrapping = wrapping
        self.dense = runs.integer_net(wrapping)
        self.indices = wrappings.local_indices(self.dense, wrapping)
        self.model = wrappings.wrap(copy.deepcopy(self.dense), wrapping)
        self.pairs = runs.named_targets(self.model, WEIGHTS)
        if kind == "adam":
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0, amsgrad=True)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.5)
        self.batches = runs.batches(self.dense, 4)
        self.masks = random_masks(self.dense, 1)
        self.whole = {name: self.dense.get_parameter(name).detach().clone() for name in WEIGHTS}
        prune.set_masks(self.pairs, list(self.masks.values()))

    def step(self, number: int) -> None:
        runs.backward(self.model, self.batches[number], *wrappings.data_rank(self.wrapping))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def replace(self, masks: dict[str, Tensor], **options):
        report = prune.set_masks(self.pairs, list(masks.values()), **options)
        for name, mask in masks.items():
            self.whole[name][mask & ~self.masks[name]] = 0
        self.masks = masks
        return report

    def differences(self, when: str) -> list[str]:
        wrong = wrong_masks(self.model, self.masks, self.indices, when)
        for name, whole in self.whole.items():
            if wrappings.is_sharded(self.wrapping, name):
                whole.mul_(self.masks[name])
            held = wrappings.shard(self.model, name, self.indices)
            part = wrappings.my_part(whole, self.indices[name])
            if not torch.equal(held.view(part.shape), part):
                wrong.append(f"{when} {name}: {held} is not {part}")
            self.dense.get_parameter(name).data.copy_(whole * self.masks[name])
        part, num_parts = wrappings.data_rank(self.wrapping)
        x = self.batches[0][0].chunk(num_parts)[part]
        with torch.no_grad():
            if not torch.equal(self.model(x), self.dense(x)):
                wrong.append(f"{when}: the output differs")
        report = prune.verify(self.model, raise_errors=False)
        counts = {p.name: p.num_pruned for p in report.parameters}
        expected = {name: int((~mask).sum()) for name, mask in self.masks.items()}
        if not report.ok or counts != expected:
            wrong.append(f"{when}: {report}\n{expected}")
        return wrong


def differences_of_updates(wrapping: str, kind: str) -> list[str]:
    case = Case(wrapping, kind)
    wrong = case.differences("first masks")
    for turn, state in enumerate(["zero", "keep", "zero"]):
        case.step(turn)
        before = {name: states(case.optimizer, case.model, name, case.indices) for name in WEIGHTS}
        old, new = case.masks, random_masks(case.dense, 2 + turn, 0.3 + 0.1 * turn)
        new["l3.weight"] = old["l3.weight"]  # nothing changes there
        report = case.replace(new, optimizer=case.optimizer if state == "zero" else None)
        for entry in report.parameters:
            mask, earlier = new[entry.name], old[entry.name]
            expected = (int((mask & ~earlier).sum()), int((earlier & ~mask).sum()))
            if (entry.num_grown, entry.num_pruned_now) != expected:
                wrong.append(f"{entry} is not {expected}")
        for name in WEIGHTS:
            after = states(case.optimizer, case.model, name, case.indices)
            changed = wrappings.my_part(new[name] ^ old[name], case.indices[name])
            if list(after) != list(before[name]):
                wrong.append(f"{state} {name}: {list(after)}")
            for key, value in after.items():
                earlier = before[name][key]
                if state == "zero" and value.ndim and key != "step":
                    earlier = earlier.masked_fill(changed.view(earlier.shape), 0)
                if not torch.equal(value, earlier):
                    wrong.append(f"{state} {name} {key}: {value} is not {earlier}")
        wrong += case.differences(state)
    for pair in case.pairs:
        hook = find_hook(unwrap(pair[0]), pair[1])
        if isinstance(hook, prune.PruningContainer):
            wrong.append(f"a container of {len(hook)} entries")
    case.step(3)  # trains on
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_updates(wrapping):
    kind = "adam" if len(wrapping) % 2 else "sgd"
    assert_nothing_wrong_on(wrapping, differences_of_updates, kind)


def differences_in_the_form_of_masks(wrapping: str) -> list[str]:
    """get_masks gives what set_masks takes, and what global_mask gives is taken, too."""
    case = Case(wrapping)
    held = prune.get_masks(case.pairs)
    prune.set_masks(case.pairs, held)
    wrong = case.differences("the same masks")
    found = prune.global_mask(case.pairs, 40)
    prune.set_masks(case.pairs, found.masks)
    if [m.tolist() for m in map(wrappings.local, prune.get_masks(case.pairs))] != [
        m.tolist() for m in map(wrappings.local, found.masks)
    ]:
        wrong.append("other masks than those of global_mask")
    if prune.verify(case.model).num_pruned != sum(w.numel() for w in case.whole.values()) - 40:
        wrong.append("another number")
    # A pruning by magnitude goes on from there, and a growth after it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prune.global_unstructured(case.pairs, prune.L1Unstructured, amount=5)
    if prune.verify(case.model).num_pruned != sum(w.numel() for w in case.whole.values()) - 35:
        wrong.append("another number after a pruning")
    return wrong


@pytest.mark.parametrize(
    "wrapping", ["ddp-3", "fsdp1_root-3", "fsdp1_flat-2", "fsdp2-3", "hsdp-2x2", "fsdp2_tp-2x2"]
)
def test_the_form_of_masks(wrapping):
    assert_nothing_wrong_on(wrapping, differences_in_the_form_of_masks)


def save_and_load(wrapping: str, path: str) -> list[str]:
    case = Case(wrapping)
    case.replace(random_masks(case.dense, 9, 0.8))
    dcp.save(checkpoint.get_state_dict(case.model, case.optimizer), checkpoint_id=path)
    fresh = Case(wrapping)
    fresh.model = wrappings.wrap(runs.integer_net(wrapping, seed=5), wrapping)
    optimizer = torch.optim.Adam(fresh.model.parameters(), lr=0.0, amsgrad=True)
    checkpoint.load(path, fresh.model, optimizer)
    fresh.whole, fresh.masks = case.whole, case.masks
    for name, parameter in fresh.dense.named_parameters():
        parameter.data.copy_(case.dense.get_parameter(name))
    wrong = fresh.differences("loaded")
    # On it goes: the loaded masks are replaced.
    fresh.pairs = runs.named_targets(fresh.model, WEIGHTS)
    fresh.replace(random_masks(case.dense, 10), optimizer=optimizer)
    return wrong + fresh.differences("replaced after loading")


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp2-2", "tp-2"])
def test_checkpoints_hold_the_masks(wrapping, tmp_path):
    assert_nothing_wrong_on(wrapping, save_and_load, str(tmp_path / "saved"))


def refused(wrapping: str, what: str) -> tuple[str, str, list[str]]:
    case = Case(wrapping)
    case.step(0)
    rank, masks, options = dist.get_rank(), random_masks(case.dense, 3), {}
    pairs = case.pairs
    match what:
        case "differ":
            masks["l2.weight"] = masks["l2.weight"] ^ (rank == 1)
        case "missing":
            masks["l2.weight"] = None
        case "shape":
            masks["l2.weight"] = masks["l2.weight"][:2]
        case "values":
            masks["l2.weight"] = masks["l2.weight"] * 0.5
        case "optimizer":
            options["optimizer"] = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        case "one rank":
            options["optimizer"] = case.optimizer if rank else None
        case "list":
            del masks["l2.weight"]
    before = snapshot(case.model)
    try:
        prune.set_masks(pairs, list(masks.values()), **options)
    except Exception as error:
        return type(error).__name__, str(error), changes(before, snapshot(case.model))
    return "nothing", "", []


REFUSED = {
    "differ": ("ValueError", "l2.weight"),
    "missing": ("TypeError", "masks[1] is a NoneType"),
    "shape": ("ValueError", "l2.weight: masks has shape (2, "),
    "values": ("ValueError", "l2.weight: its mask has the value 0.5"),
    "optimizer": ("ValueError", "l1.weight is none of the optimizer's parameters"),
    "one rank": ("ValueError", "an optimizer is given"),
    "list": ("ValueError", "2 masks for 3 parameters"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp2-2"])
def test_refused_on_all_ranks(wrapping, what):
    for kind, text, changed in run_ranks(refused, 2, wrapping, what):
        expected, part = REFUSED[what]
        assert (kind, changed) == (expected, []) and part in text, (kind, text)
