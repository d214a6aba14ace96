"""``python -m distprune selftest``: tests the contract on this machine, backend and torch.

Small models are wrapped in every way that the number of ranks allows, and each check compares
distprune with a reference: numpy and one sort, and torch's own pruning. It needs torch and numpy
only, and says what holds, what does not, and what could not be tried.

Each check is collective over all ranks. It yields a sentence for each problem on this rank, and
raises nothing for it: the other ranks would wait for a rank that leaves in the middle. Where ranks
hang, torch's timeout of the process group ends it.

The elements of a rank are determined without distprune: a copy of the model is filled with the
index of each element and wrapped in the same way, so that the rank's part of it *is* the list of
its indices.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed does not declare it
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import prune as reference

import distprune
from distprune.base.pruned_form import MASK, ORIG, local_tensor
from distprune.ranks.collectives import end_groups
from distprune.wrappers import wrapper

_AMOUNTS = (0.3, 17, 0.5)  # of successive prunings
_RTOL, _ATOL = 1e-4, 1e-5  # for sums, whose order depends on the ranks
_TRAFFIC_LIMIT = 256_000  # bytes that one pruning may send per rank, whatever the model's size
_CPU = torch.device("cpu")
_LEARNING_RATE = 0.1  # of SGD, which DeepSpeed has to know when it wraps a model


def _layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _local(model: nn.Module, key: str = "weight") -> list[np.ndarray]:
    """Copies of this rank's parts of the weights, or of tensors beside them; 1-d."""
    found = []
    for layer in _layers(model):
        tensor = getattr(layer, key if hasattr(layer, key) else "weight")
        part: Any = getattr(tensor, "ds_tensor", None)  # what ZeRO-3 leaves of it here, with zeros
        if part is None:
            part = local_tensor(tensor.detach())
        else:
            part = part.detach()[: max(0, tensor.ds_numel - dist.get_rank() * part.numel())]
        found.append(part.clone().cpu().numpy().reshape(-1))
    return found


@dataclass
class Case:
    """The argument of every check: one way to wrap models, on this rank.

    Attributes:
        name: its name in the table.
        min_ranks: the smallest number of ranks; with 4 they are a mesh of two axes.
        num_alike: number of ranks that get the same part of a batch; 0: all.
        device: of this rank.
        detail: a few words about a measurement, from the check; shown instead of "ok".
    """

    name: str
    min_ranks: int = 1
    num_alike: int = 1
    device: torch.device = _CPU
    detail: str = "ok"

    def why_not(self) -> str:
        """Why it cannot be tried on this rank; "" if it can."""
        size = dist.get_world_size()
        if size < self.min_ranks or (self.min_ranks == 4 and size % 2):
            return f"needs {self.min_ranks} ranks" + ", in pairs" * (size > 4)
        if self.name == "ZeRO-3":
            if torch.accelerator.is_available() and dist.get_backend() == "gloo":
                return "deepspeed takes an accelerator for each rank"
            os.environ.setdefault("DS_ACCELERATOR", self.device.type)
            try:
                with contextlib.redirect_stdout(sys.stderr):  # its log
                    importlib.import_module("deepspeed")
            except Exception as error:  # libraries raise what they like
                return f"needs deepspeed: {error}"
        return ""

    @torch.no_grad()
    def net(self, values: str, num_inputs: int = 6) -> nn.Sequential:
        """Three linear layers on this rank's device, the same on every rank.

        Args:
            values: "distinct", "tied", or the "indices" of elements.
            num_inputs: of the first layer.
        """
        # Tensor parallelism splits the hidden units; most numbers of ranks do not divide 10 and 5.
        width = dist.get_world_size() * -(-2 * num_inputs // dist.get_world_size())
        first, second = nn.Linear(num_inputs, width), nn.Linear(width, 10)
        net = nn.Sequential(first, nn.ReLU(), second, nn.Tanh(), nn.Linear(10, 5))
        generator = torch.Generator().manual_seed(0)
        for parameter in net.parameters():
            normal = torch.randn(parameter.shape, generator=generator)
            if values == "tied":
                normal = (normal * 4).round() / 4
            elif values == "indices":
                normal = torch.arange(1.0 * normal.numel()).view_as(normal)
            parameter.copy_(normal)
        return net.to(self.device)

    def wrap(self, net: nn.Sequential) -> nn.Module:
        """The model, wrapped."""
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        from torch.distributed.tensor import parallel

        size = dist.get_world_size()
        if self.name == "ZeRO-3":
            return _engine(net)
        if self.name == "DDP":
            return nn.parallel.DistributedDataParallel(net)
        if self.name == "FSDP1":
            policy = ModuleWrapPolicy({nn.Linear})
            return FullyShardedDataParallel(
                net, auto_wrap_policy=policy, device_id=self.device, use_orig_params=True
            )
        shape = (size // 2, 2) if self.min_ranks == 4 else (size,)
        names = ("outer", "inner")[-len(shape) :]
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        if "TP" in self.name:
            plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
            parallel.parallelize_module(net, mesh["inner"], plan)
            mesh = mesh[names[0]]
        for layer in (*_layers(net), net) if self.name != "TP" else ():
            fully_shard(layer, mesh=mesh)  # in place
        return net


def _engine(net: nn.Module) -> nn.Module:
    """DeepSpeed's engine for a model, of ZeRO-3 with SGD."""
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel("ERROR")
    # Nothing is compiled: for ranks of one machine it is a faster all-reduce, after minutes.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, str(dist.get_rank()))
    os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer, linear = torch.optim.SGD(net.parameters(), _LEARNING_RATE), nn.functional.linear
    try:
        engine: nn.Module = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    finally:
        nn.functional.linear = linear  # ZeRO-3 replaces it for all that comes later
    return engine


WRAPPINGS = (
    Case("plain", num_alike=0),
    Case("DDP"),
    Case("FSDP1", min_ranks=2),
    Case("FSDP2"),
    Case("HSDP", min_ranks=4),
    Case("TP", num_alike=0),
    Case("FSDP2 + TP", min_ranks=4, num_alike=2),
    Case("ZeRO-3"),
)


class Subject:
    """A wrapped model that is pruned by magnitude, beside a reference that is numpy and one sort.

    Attributes:
        values: the whole weights before any pruning, 1-d.
        keeps: their masks (True: keep) by the reference, 1-d.
        own: for each weight, the row-major indices of this rank's elements.
    """

    def __init__(self, case: Case, values: str) -> None:
        net, indices = case.net(values), case.wrap(case.net("indices"))
        self.own = [part.astype(np.int64) for part in _local(indices)]
        self.values = _local(net)
        self.keeps = [np.ones(whole.shape, bool) for whole in self.values]
        self.model = case.wrap(net)

    def prune(self, amount: int | float, when: str) -> Iterator[str]:
        """Prune the model; by the reference, too; compare numbers, and this rank's masks."""
        report, kept = _prune(self.model, amount), np.concatenate(self.keeps)
        # The order is (magnitude, position in the list, row-major index), among the elements that
        # are not pruned yet; exactly ``amount`` elements, or this share of them, are pruned.
        order = np.argsort(np.abs(np.concatenate(self.values)), kind="stable")
        order = order[kept[order]]
        expected = amount if isinstance(amount, int) else round(amount * len(order))
        kept[order[:expected]] = False
        self.keeps = np.split(kept, np.cumsum([len(whole) for whole in self.values])[:-1])
        if report.num_pruned_now != expected:
            yield f"{when}: {report.num_pruned_now} elements were pruned, expected {expected}"
        masks = _local(self.model, "weight" + MASK)
        for number, (mask, keep, own) in enumerate(zip(masks, self.keeps, self.own, strict=True)):
            differs = (mask != 0) != keep[own]
            if differs.any():
                yield (
                    f"{when}: {int(differs.sum())} of {differs.size} mask elements of layer "
                    f"{number} on this rank differ from the reference, the first at index "
                    f"{int(own[differs][0])} of the whole parameter"
                )


def check_private_fields(case: Case) -> Iterator[str]:
    """The private fields and functions of torch exist."""
    model = case.wrap(case.net("distinct"))
    yield from (f"torch has no {name}" for name in wrapper.missing(model))


def check_masks(case: Case) -> Iterator[str]:
    """Masks by magnitude are those of one process, bit for bit, ties included."""
    for values in ("distinct", "tied"):
        subject = Subject(case, values)
        for amount in _AMOUNTS:
            yield from subject.prune(amount, f"{values} values, amount {amount}")


def check_traffic(case: Case) -> Iterator[str]:
    """A pruning sends kilobytes, however large the model is."""
    sent = _prune(case.wrap(case.net("distinct", num_inputs=512)), 0.5).bytes_sent
    case.detail = f"{sent / 1000:.0f} kB"
    if sent > _TRAFFIC_LIMIT:
        yield f"one pruning sent {case.detail}; expected at most {_TRAFFIC_LIMIT / 1000:.0f} kB"


def check_all_or_none(case: Case) -> Iterator[str]:
    """When one rank passes another amount, every rank raises and nothing changes."""
    if dist.get_world_size() == 1:
        case.detail = "-"
        return
    subject = Subject(case, "tied")
    before = _local(subject.model)
    try:
        _prune(subject.model, 0.25 if dist.get_rank() else 0.5)
        yield "amounts that differ between the ranks raised no error here"
    except ValueError as error:
        if "amount" not in str(error):
            yield f"the error does not name the amount: {error}"
    is_same = all(map(np.array_equal, _local(subject.model), before))
    if distprune.is_pruned(subject.model) or not is_same:
        yield "the model has changed although the ranks' amounts differ"
    else:
        yield from subject.prune(0.5, "after the error")  # goes on as if nothing had been


def check_training(case: Case) -> Iterator[str]:
    """A step of training is that of torch's own pruning with the same masks."""
    dense, subject = case.net("distinct"), Subject(case, "distinct")
    model: Any = subject.model
    is_engine = case.name == "ZeRO-3"
    optimizer: Any = torch.optim.SGD(model.parameters(), _LEARNING_RATE, foreach=False)
    yield from subject.prune(0.5, "before the step")
    for layer, keep in zip(_layers(dense), subject.keeps, strict=True):
        mask = torch.from_numpy(keep).to(layer.weight).view_as(layer.weight)
        reference.custom_from_mask(layer, "weight", mask)  # type: ignore[no-untyped-call]
    num_alike = case.num_alike or dist.get_world_size()
    generator, num_rows = torch.Generator().manual_seed(7), 4 * dist.get_world_size() // num_alike
    batch = torch.randn(num_rows, 6, generator=generator).to(case.device)
    first = 4 * (dist.get_rank() // num_alike)
    mine = batch[first : first + 4]
    output, expected = model(mine), dense(batch)
    yield from _far("the output", output.detach(), expected.detach()[first : first + 4])
    (model if is_engine else torch.autograd).backward(output.square().sum(1).mean())
    (model if is_engine else optimizer).step()
    expected.square().sum(1).mean().backward()
    torch.optim.SGD(dense.parameters(), _LEARNING_RATE).step()
    trained = zip(_local(dense, "weight_orig"), subject.keeps, subject.own, strict=True)
    for number, (whole, keep, own) in enumerate(trained):
        is_held = not hasattr(_layers(model)[number], "weight" + ORIG)
        values = np.where(keep, whole, 0) if is_held else whole
        held = _local(model, "weight" + ORIG)[number]
        yield from _far(f"the weight of layer {number} after a step", held, values[own])
    with torch.no_grad():
        yield from _far("the output after a step", model(mine), dense(batch)[first : first + 4])


# In the order in which they run; the names are the columns of the table.
CHECKS: dict[str, Callable[[Case], Iterator[str]]] = {
    "private fields": check_private_fields,
    "masks": check_masks,
    "traffic": check_traffic,
    "all or none": check_all_or_none,
    "training": check_training,
}


def _prune(model: nn.Module, amount: int | float) -> distprune.PruningReport:
    selected = distprune.select(model)
    return distprune.global_unstructured(selected, distprune.L1Unstructured, amount=amount)


def _far(what: str, actual: Any, expected: Any) -> Iterator[str]:
    """A problem if two arrays or tensors differ by more than rounding."""
    actual, expected = (torch.as_tensor(values).cpu().numpy() for values in (actual, expected))
    if not np.allclose(actual, expected, rtol=_RTOL, atol=_ATOL):
        distance = float(np.abs(actual - expected).max())
        yield f"{what} differs from the reference by up to {distance:.3g}"


def join(timeout: float, *, cpu: bool) -> tuple[torch.device, str]:
    """Initialise the process group of the ranks that torchrun started, or of this process alone.

    Args:
        timeout: of the group, in seconds.
        cpu: use the CPU even if there are accelerators.

    Returns:
        The device of this rank, and a note if ranks share it, which they can over gloo alone.

    Raises:
        RuntimeError, ValueError: of torch, the ranks do not find each other.
    """
    place: dict[str, Any] = {}
    device, note = torch.device("cpu"), ""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and not cpu:
        number, num_here = torch.accelerator.device_count(), os.environ.get("LOCAL_WORLD_SIZE", 1)
        if int(num_here) > number:
            note = f"{num_here} ranks share {number} devices, over gloo"
        index = int(os.environ.get("LOCAL_RANK", 0)) % number
        torch.accelerator.set_device_index(index)
        device = torch.device(accelerator.type, index)
    backend = "gloo" if note else dist.get_default_backend_for_device(device)
    if "RANK" not in os.environ:
        place = {"store": HashStore(), "rank": 0, "world_size": 1}
    device_id, patience = None if backend == "gloo" else device, timedelta(seconds=timeout)
    dist.init_process_group(backend, timeout=patience, device_id=device_id, **place)
    return device, note


def run(
    device: torch.device, note: str, timeout: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run every check on every wrapping that the ranks allow. Collective.

    Args:
        device, note, timeout: see :func:`join`.
        say: gets the lines of the report for people.

    Returns:
        The report, the same on every rank: "facts" for a bug report, "wrappings" (what came of each
        check by wrapping), "wrong" (what does not hold, in words), "ended" (whether the test ended
        early: the process groups are of no use then), "holds".
    """
    facts = {
        "distprune": distprune.__version__, "torch": torch.__version__,
        "tested": " to ".join(wrapper.TESTED), "python": sys.version,
        "platform": platform.platform(), "device": str(device), "backend": dist.get_backend(),
        "ranks": str(dist.get_world_size()), "note": note,
    }  # fmt: skip
    for name in filter(facts.get, facts):
        say(_row(name, [facts[name]]))
    say("\n" + _row("", CHECKS))
    # Not the groups under test: a rank that failed in the middle of a collective waits here for
    # the others, which torch's timeout ends.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * timeout))

    def gather(value: Any) -> list[Any]:
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group)
        return values

    wrappings: dict[str, dict[str, str]] = {}
    wrong, ended = [], False
    try:
        for wrapping in (replace(each, device=device) for each in WRAPPINGS):
            reason = next(filter(None, gather(wrapping.why_not())), "")
            wrappings[wrapping.name] = cells = {"tried": f"not tried: {reason}"} if reason else {}
            for name, check in CHECKS.items() if not reason else ():
                case = replace(wrapping)
                answers = gather(_outcome(check, case))
                texts = [(rank, text) for rank, (found, _) in enumerate(answers) for text in found]
                wrong += [f'"{name}" on {case.name}, rank {rank}: {text}' for rank, text in texts]
                cells[name] = "FAILED" if texts else case.detail
                if len({has_raised for _, has_raised in answers}) > 1:
                    raise RuntimeError("a check raised on some ranks only, which are out of step")
            say(_row(wrapping.name, cells.values()))
    except RuntimeError as error:
        wrong, ended = [*wrong, f"ended early: {error}"], True
    for text in wrong:
        say(f"\nFAILED: {text}")
    say("\n" + (f"{len(wrong)} problems." if wrong else "Everything that was tried holds."))
    report = {"facts": facts, "wrappings": wrappings, "wrong": wrong, "ended": ended}
    return {**report, "holds": not wrong}


def _outcome(check: Callable[[Case], Iterator[str]], case: Case) -> tuple[list[str], bool]:
    """What a check finds on this rank, and whether it raised."""
    try:
        return list(check(case)), False
    except Exception as error:
        return ["".join(traceback.format_exception(error)).rstrip()], True


def _row(name: str, cells: Iterable[str]) -> str:
    return (f"{name:<12}" + "".join(f"{cell:<16}" for cell in cells)).rstrip()


def main(arguments: Sequence[str]) -> int:
    """Run the self-test on this rank, as the command line does; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="distprune selftest",
        description="Check what distprune guarantees on this machine, with this backend and "
        "version of torch; under torchrun on several ranks. The exit code is 0 if all that was "
        "tried holds, 1 if something does not or ranks are lost, and 2 for wrong usage.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--cpu", action="store_true", help="test gloo on the CPU, not accelerators")
    text = "of torch's process groups, in seconds (default 60)"
    parser.add_argument("--timeout", type=float, default=60.0, help=text)
    options = parser.parse_args(arguments)
    try:
        device, note = join(options.timeout, cpu=options.cpu)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"distprune: could not initialise the process group: {error}")
    is_first = dist.get_rank() == 0
    warnings.simplefilter("ignore")

    def say(text: str) -> None:
        if is_first and not options.json:
            print(text, flush=True)

    report = run(device, note, options.timeout, say)
    if options.json and is_first:
        print(json.dumps(report, indent=2), flush=True)
    if report["ended"]:
        # The group's other ranks may be gone: nothing may wait for them.
        sys.stderr.flush()
        os._exit(1)
    end_groups()
    return 0 if report["holds"] else 1
