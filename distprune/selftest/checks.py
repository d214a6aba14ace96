"""The checks that run on each wrapper, one function for each part of the contract.

Each is collective over all ranks. A check returns what is wrong on this rank and does not raise
for it: the other ranks would wait for a rank that leaves in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import distprune
from distprune._common.pruned_form import is_dtensor, orig_key
from distprune.selftest.comparing import (
    Traffic,
    far,
    masked_output,
    state_of,
    whole_weights,
    wrong_masks,
)
from distprune.selftest.models import WEIGHTS, Case, local_values, net, reference_masks, weights_of
from distprune.torch_private import private_fields
from distprune.torch_private.wrapper import managed_parameters

_AMOUNTS = (0.3, 17, 0.5)  # of successive prunings
_TRAFFIC_LIMIT = 256_000  # bytes that one pruning may send per rank, whatever the model's size


@dataclass
class Findings:
    """The result of a check on this rank.

    Attributes:
        wrong: one sentence for each problem.
        detail: a few words about a measurement; shown instead of "ok".
    """

    wrong: list[str] = field(default_factory=list)
    detail: str = ""


class NotTried(Exception):
    """A check cannot run on these ranks; the reason is the same on every rank."""


def check_private_fields(case: Case) -> Findings:
    """The private fields and functions of torch exist."""
    model, adapters = case.wrapped(net("distinct", case.num_ranks)), case.wrapping.adapters
    missing = [name for adapter in adapters for name in private_fields.missing_names(adapter)]
    objects: list[tuple[str, str, Any]] = [("Module", "Module", model)]
    if "DDP" in adapters:
        objects.append(("DDP", "DistributedDataParallel", model))
    objects += [("DTensor", "DTensor", p) for p in model.parameters() if is_dtensor(p)]
    for wrapper, kind, instance in objects:
        missing += private_fields.missing_fields(wrapper, {kind: instance})
    if "FSDP2" in adapters:
        missing += private_fields.missing_states(model)
    findings = Findings([f"torch has no {name}" for name in dict.fromkeys(missing)])
    if {"FSDP1", "FSDP2"} & set(adapters):
        managed = managed_parameters(model)
        if any((id(module), name) not in managed for module, name in weights_of(model)):
            findings.wrong.append("parameters are not found in the wrapper")
        for record in managed.values():
            try:
                record.check_fields()
            except NotImplementedError as error:
                findings.wrong.append(str(error))
                break
    return findings


def check_masks(case: Case) -> Findings:
    """Masks by magnitude are those of one process, bit for bit, ties included."""
    findings, indices = Findings(), case.indices()
    for kind in ("distinct", "tied", "equal"):
        model: nn.Module = net(kind, case.num_ranks)
        values = whole_weights(model)
        keeps = [np.ones(whole.shape, dtype=bool) for whole in values]
        model = case.wrapped(model)
        for amount in _AMOUNTS:
            before = sum(int(keep.sum()) for keep in keeps)
            keeps = reference_masks(values, amount, keeps)
            expected = before - sum(int(keep.sum()) for keep in keeps)
            report = _prune(model, amount)
            when = f"{kind} values, amount {amount}"
            if report.num_pruned_now != expected:
                findings.wrong.append(
                    f"{when}: {report.num_pruned_now} elements were pruned, expected {expected}"
                )
            findings.wrong += wrong_masks(model, keeps, indices, when)
    return findings


def check_traffic(case: Case) -> Findings:
    """A pruning sends kilobytes, however large the model is."""
    model = case.wrapped(net("distinct", case.num_ranks, num_inputs=512))
    with Traffic() as traffic:
        _prune(model, 0.5)
    findings = Findings(detail=f"{traffic.num_bytes / 1000:.0f} kB")
    if traffic.num_bytes > _TRAFFIC_LIMIT:
        num_bytes = 4 * sum(whole.size for whole in whole_weights(net("equal", 1, num_inputs=512)))
        findings.wrong.append(
            f"one pruning sent {traffic.num_bytes / 1000:.0f} kB in {traffic.num_calls} "
            f"collectives, of a model whose weights are {num_bytes / 1000:.0f} kB; expected at "
            f"most {_TRAFFIC_LIMIT / 1000:.0f} kB"
        )
    return findings


def check_all_or_none(case: Case) -> Findings:
    """When one rank passes another amount, every rank raises and nothing changes."""
    if case.num_ranks < 2:
        raise NotTried("needs 2 ranks")
    findings, indices = Findings(), case.indices()
    model: nn.Module = net("tied", case.num_ranks)
    values = whole_weights(model)
    model = case.wrapped(model)
    before = state_of(model)
    try:
        _prune(model, 0.25 if case.rank == case.num_ranks - 1 else 0.5)
        findings.wrong.append("amounts that differ between the ranks raised no error here")
    except ValueError as error:
        if "amount" not in str(error):
            findings.wrong.append(f"the error does not name the amount: {error}")
    if state_of(model) != before:
        findings.wrong.append("the model has changed although the ranks' amounts differ")
        return findings
    _prune(model, 0.5)  # goes on as if nothing had been
    keeps = reference_masks(values, 0.5, [np.ones(whole.shape, dtype=bool) for whole in values])
    findings.wrong += wrong_masks(model, keeps, indices, "after the error")
    return findings


def check_training(case: Case) -> Findings:
    """A step of training is that of a dense model with masked weights, and the zeros stay."""
    findings, indices = Findings(), case.indices()
    model: nn.Module = net("distinct", case.num_ranks)
    dense = net("distinct", case.num_ranks).to(case.device)
    values = whole_weights(model)
    keeps = reference_masks(values, 0.5, [np.ones(whole.shape, dtype=bool) for whole in values])
    model = case.wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _prune(model, 0.5)

    index, num_parts = case.wrapping.part(case.num_ranks, case.rank)
    generator = torch.Generator().manual_seed(7)
    batch = torch.randn(4 * num_parts, 6, generator=generator).to(case.device)
    rows = slice(4 * index, 4 * index + 4)
    masks = {
        name: torch.from_numpy(k).to(case.device) for name, k in zip(WEIGHTS, keeps, strict=True)
    }

    output = model(batch[rows])
    findings.wrong += far("the output", output, masked_output(dense, masks, batch)[rows])
    torch.autograd.backward(output.square().sum(1).mean())
    optimizer.step()
    torch.autograd.backward(masked_output(dense, masks, batch).square().sum(1).mean())
    with torch.no_grad():
        for parameter in dense.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
        trained = whole_weights(dense)
        for i, (module, name) in enumerate(weights_of(model)):
            mine, parts = local_values(module, orig_key(name)), indices[i]
            expected = trained[i].reshape(-1)[parts]
            findings.wrong += far(f"{WEIGHTS[i]} after a step", mine, expected)
            pruned = ~keeps[i].reshape(-1)[parts]
            if not np.array_equal(mine[pruned], values[i].reshape(-1)[parts][pruned]):
                findings.wrong.append(f"a step changed pruned elements of {WEIGHTS[i]}")
        output = model(batch[rows])
        expected = masked_output(dense, masks, batch)[rows]
        findings.wrong += far("the output after a step", output, expected)
    return findings


# In the order in which they run; the names are the columns of the table.
CHECKS: dict[str, Callable[[Case], Findings]] = {
    "private fields": check_private_fields,
    "masks": check_masks,
    "traffic": check_traffic,
    "all or none": check_all_or_none,
    "training": check_training,
}


def _prune(model: nn.Module, amount: int | float) -> distprune.PruningReport:
    selected = distprune.select(model)
    return distprune.global_unstructured(selected, distprune.L1Unstructured, amount=amount)
