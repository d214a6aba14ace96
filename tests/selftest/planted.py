"""Faults to plant in distprune, and a self-test that runs with one of them on every rank."""

import contextlib
import importlib
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

import distprune
from distprune import selftest
from helpers import deepspeed_state


def report_of(wrappings, only, fault=None):
    """The report of this rank, of a run on some wrappings with some of the checks."""
    chosen = [each for each in selftest.WRAPPINGS if each.name in wrappings]
    if "deepspeed" in sys.modules:
        deepspeed_state.forget()
    some = {name: check for name, check in selftest.CHECKS.items() if name in only}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(selftest, "WRAPPINGS", chosen))
        stack.enter_context(mock.patch.object(selftest, "CHECKS", some))
        if fault is not None:
            FAULTS[fault](stack)
            # Ranks out of step: as the self-test's own group would, this one times out.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), dist.group.WORLD)
        lines = []
        report = selftest.run(torch.device("cpu"), "", 60.0, lines.append)
    return report, "\n".join(lines)


def replace(stack, module, path, value):
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    stack.enter_context(mock.patch.object(owner, name, value))


def swap_ties(stack):
    """Of two equal magnitudes the later one is pruned instead of the earlier one."""
    prune = distprune.global_unstructured

    def changed(parameters, *args, **kwargs):
        before = [getattr(module, name).detach().clone() for module, name in parameters]
        report = prune(parameters, *args, **kwargs)
        for (module, name), values in zip(parameters, before, strict=True):
            mask = getattr(module, name + "_mask")
            if hasattr(mask, "to_local"):
                swap(mask.to_local(), values.to_local())
        return report

    stack.enter_context(mock.patch.object(distprune, "global_unstructured", changed))


@torch.no_grad()
def swap(mask, values):
    flat, magnitudes = mask.view(-1), values.abs().flatten()
    for first in flat.logical_not().nonzero().flatten().tolist():
        others = flat.bool() & (magnitudes == magnitudes[first])
        if others.any():
            flat[first], flat[int(others.nonzero()[0])] = 1, 0
            return


def one_too_many(stack):
    count = importlib.import_module("distprune.base.amount").checked_count
    replace(stack, "distprune.methods.ranking", "checked_count", lambda *args: count(*args) + 1)


def idle_mask(stack):
    """The mask is registered, and nothing is zeroed."""
    replace(stack, "distprune.wrappers.held", "Held.zero", lambda self: None)


def dense_master(stack):
    """The mask of ZeRO-3 does not act on what the ranks store."""
    replace(stack, "distprune.wrappers.held", "zero_pruned", lambda values, mask: None)


def much_traffic(stack):
    reduce = importlib.import_module("distprune.ranks.collectives").Communicator._reduce

    def wasteful(self, values, op):
        reduce(self, torch.zeros(100_000, dtype=torch.int64), op)
        return reduce(self, values, op)

    replace(stack, "distprune.ranks.collectives", "Communicator._reduce", wasteful)


def uncompared_amounts(stack):
    describe = classmethod(lambda cls, *arguments: [])
    replace(stack, "distprune.methods.base", "BasePruningMethod.describe_arguments", describe)


def changed_before_agreed(stack):
    """The error comes on every rank, and a parameter has changed by then."""
    prune = distprune.global_unstructured

    def impatient(parameters, *args, **kwargs):
        parameters = list(parameters)
        module, name = parameters[0]
        if not hasattr(module, name + "_mask"):
            with torch.no_grad():
                getattr(module, name).mul_(0.5)
        return prune(parameters, *args, **kwargs)

    stack.enter_context(mock.patch.object(distprune, "global_unstructured", impatient))


def renamed_field(stack):
    fields = importlib.import_module("distprune.wrappers.wrapper").FIELDS
    names = {"FSDP2Parameter": "fsdp_param.sharded_param fsdp_param._of_tomorrow"}
    stack.enter_context(mock.patch.dict(fields, names))


def lost_function(stack):
    names = importlib.import_module("distprune.wrappers.wrapper").NAMES
    stack.enter_context(mock.patch.dict(names, {"torch.distributed.tensor": "No"}))


def one_rank_raises(stack):
    def check(case):
        if dist.get_rank() == 1:
            raise MemoryError("planted")
        return []

    stack.enter_context(mock.patch.dict(selftest.CHECKS, {"masks": check}))


FAULTS = {
    each.__name__: each
    for each in (
        swap_ties, one_too_many, idle_mask, dense_master, much_traffic,
        uncompared_amounts, changed_before_agreed, renamed_field,
        lost_function, one_rank_raises,
    )
}  # fmt: skip
