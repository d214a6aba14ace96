"""The checks that run on each wrapper, one function for each part of the contract.

Each is collective over all ranks. A check returns what is wrong on this rank and does not raise
for it: the other ranks would wait for a rank that leaves in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import distprune
from distprune._common.pruned_form import is_dtensor, local_tensor, mask_key, orig_key
from distprune.torch_private import private_fields
from distprune.torch_private.wrapper import managed_parameters

_AMOUNTS = (0.3, 17, 0.5)  # of successive prunings
_RTOL, _ATOL = 1e-4, 1e-5  # for sums, whose order depends on the ranks
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
        values = _whole_weights(model)
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
            findings.wrong += _wrong_masks(model, keeps, indices, when)
    return findings


def check_traffic(case: Case) -> Findings:
    """A pruning sends kilobytes, however large the model is."""
    model = case.wrapped(net("distinct", case.num_ranks, num_inputs=512))
    with _Traffic() as traffic:
        _prune(model, 0.5)
    findings = Findings(detail=f"{traffic.num_bytes / 1000:.0f} kB")
    if traffic.num_bytes > _TRAFFIC_LIMIT:
        num_bytes = 4 * sum(whole.size for whole in _whole_weights(net("equal", 1, num_inputs=512)))
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
    values = _whole_weights(model)
    model = case.wrapped(model)
    before = _state_of(model)
    try:
        _prune(model, 0.25 if case.rank == case.num_ranks - 1 else 0.5)
        findings.wrong.append("amounts that differ between the ranks raised no error here")
    except ValueError as error:
        if "amount" not in str(error):
            findings.wrong.append(f"the error does not name the amount: {error}")
    if _state_of(model) != before:
        findings.wrong.append("the model has changed although the ranks' amounts differ")
        return findings
    _prune(model, 0.5)  # goes on as if nothing had been
    keeps = reference_masks(values, 0.5, [np.ones(whole.shape, dtype=bool) for whole in values])
    findings.wrong += _wrong_masks(model, keeps, indices, "after the error")
    return findings


def check_training(case: Case) -> Findings:
    """A step of training is that of a dense model with masked weights, and the zeros stay."""
    findings, indices = Findings(), case.indices()
    model: nn.Module = net("distinct", case.num_ranks)
    dense = net("distinct", case.num_ranks).to(case.device)
    values = _whole_weights(model)
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
    findings.wrong += _far("the output", output, _masked_output(dense, masks, batch)[rows])
    torch.autograd.backward(output.square().sum(1).mean())
    optimizer.step()
    torch.autograd.backward(_masked_output(dense, masks, batch).square().sum(1).mean())
    with torch.no_grad():
        for parameter in dense.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
        trained = _whole_weights(dense)
        for i, (module, name) in enumerate(weights_of(model)):
            mine, parts = local_values(module, orig_key(name)), indices[i]
            expected = trained[i].reshape(-1)[parts]
            findings.wrong += _far(f"{WEIGHTS[i]} after a step", mine, expected)
            pruned = ~keeps[i].reshape(-1)[parts]
            if not np.array_equal(mine[pruned], values[i].reshape(-1)[parts][pruned]):
                findings.wrong.append(f"a step changed pruned elements of {WEIGHTS[i]}")
        output = model(batch[rows])
        expected = _masked_output(dense, masks, batch)[rows]
        findings.wrong += _far("the output after a step", output, expected)
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


def _whole_weights(model: nn.Module) -> list[np.ndarray]:
    """Copies of the weights of a model that is not wrapped."""
    return [model.get_parameter(name).detach().clone().cpu().numpy() for name in WEIGHTS]


def _wrong_masks(
    model: nn.Module, keeps: list[np.ndarray], indices: list[np.ndarray], when: str
) -> list[str]:
    """Compare this rank's masks with its parts of the whole masks, bit for bit."""
    wrong = []
    pairs = weights_of(model)
    for label, (module, name), keep, parts in zip(WEIGHTS, pairs, keeps, indices, strict=True):
        if not hasattr(module, mask_key(name)):
            wrong.append(f"{when}: {label} has no mask")
            continue
        mask, expected = local_values(module, mask_key(name)), keep.reshape(-1)[parts]
        if mask.shape != expected.shape:
            wrong.append(
                f"{when}: the mask of {label} has shape {mask.shape}, expected {expected.shape}"
            )
            continue
        differs = (mask != 0) != expected
        if differs.any():
            wrong.append(
                f"{when}: {int(differs.sum())} of {differs.size} mask elements of {label} on this "
                f"rank differ from the reference, the first at index {int(parts[differs][0])} of "
                "the whole parameter"
            )
    return wrong


def _masked_output(dense: nn.Module, masks: dict[str, Tensor], batch: Tensor) -> Tensor:
    """The output of a dense model whose weights are multiplied by masks."""
    masked = {name: dense.get_parameter(name) * mask for name, mask in masks.items()}
    output: Tensor = torch.func.functional_call(dense, masked, (batch,))
    return output


def _far(what: str, actual: Any, expected: Any) -> list[str]:
    """A problem if two arrays differ by more than rounding."""
    actual, expected = (
        values.detach().cpu().numpy() if isinstance(values, Tensor) else values
        for values in (actual, expected)
    )
    if actual.shape != expected.shape:
        return [f"{what} has shape {actual.shape}, expected {expected.shape}"]
    if np.allclose(actual, expected, rtol=_RTOL, atol=_ATOL):
        return []
    distance = float(np.abs(actual - expected).max())
    return [f"{what} differs from the reference by up to {distance:.3g}"]


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a pruning may change, for comparison with ==."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[name] = [*module._parameters, *module._buffers, *module._forward_pre_hooks]
    for module, name in weights_of(model):
        if hasattr(module, name):
            state[f"{id(module)} {name}"] = local_values(module, name).tobytes()
    return state


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts the collectives that the dispatcher runs, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if "c10d" in func.namespace and name not in ("wait_tensor", "monitored_barrier_"):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.num_calls += 1
            self.num_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


WEIGHTS = ("l1.weight", "l2.weight", "l3.weight")


class Net(nn.Module):
    """Three linear layers; most numbers of ranks do not divide their 10 and 5 rows."""

    def __init__(self, num_inputs: int, num_hidden: int) -> None:
        super().__init__()
        self.l1 = nn.Linear(num_inputs, num_hidden)
        self.l2 = nn.Linear(num_hidden, 10)
        self.l3 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.l3(torch.tanh(self.l2(torch.relu(self.l1(x)))))
        return output


@torch.no_grad()
def net(values: str, num_ranks: int, *, num_inputs: int = 6) -> Net:
    """A model on the CPU, the same on every rank.

    Args:
        values: "distinct"; "tied", a few multiples of 1/4; "equal", all of one magnitude;
            "indices", each element's row-major index.
        num_ranks: divides the number of hidden units, as tensor parallelism needs.
        num_inputs: width of the first layer.
    """
    model = Net(num_inputs, num_ranks * -(-2 * num_inputs // num_ranks))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        shape = parameter.shape
        content = torch.randn(shape, generator=generator)
        if values == "tied":
            content = (content * 4).round() / 4
        elif values == "equal":
            content = torch.full(shape, 0.5).copysign(content)
        elif values == "indices":
            content = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
        parameter.copy_(content)
    return model


@dataclass(frozen=True)
class Wrapping:
    """One way to wrap a model.

    Attributes:
        name: its name in the table.
        adapters: the adapters whose private fields it needs, keys of torch_private.private_fields.
        min_ranks: the smallest number of ranks.
        num_axes: number of mesh axes; two axes need an even number of ranks.
        batch_axes: the mesh axes whose ranks have different parts of a batch.
    """

    name: str
    adapters: tuple[str, ...]
    min_ranks: int = 1
    num_axes: int = 1
    batch_axes: tuple[int, ...] = (0,)

    def why_not(self, num_ranks: int) -> str | None:
        """Why it cannot run on this number of ranks; None if it can."""
        if num_ranks < self.min_ranks:
            return f"needs {self.min_ranks} ranks"
        return "needs an even number of ranks" if num_ranks % self.num_axes else None

    def mesh_shape(self, num_ranks: int) -> tuple[int, ...]:
        """The shape of a mesh of all ranks."""
        return (num_ranks,) if self.num_axes == 1 else (num_ranks // 2, 2)

    def part(self, num_ranks: int, rank: int) -> tuple[int, int]:
        """(index of a rank's part of a batch, number of parts)."""
        shape = self.mesh_shape(num_ranks)
        coordinate = np.unravel_index(rank, shape)
        index, num_parts = 0, 1
        for axis in self.batch_axes:
            index = index * shape[axis] + int(coordinate[axis])
            num_parts *= shape[axis]
        return index, num_parts

    def wrap(self, model: nn.Module, device: torch.device, num_ranks: int) -> nn.Module:
        """Wrap a model on this rank's device."""
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        from torch.distributed.tensor import parallel

        shape = self.mesh_shape(num_ranks)
        names = ("outer", "inner")[-len(shape) :]
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        if "TP" in self.name:
            plan = {"l1": parallel.ColwiseParallel(), "l2": parallel.RowwiseParallel()}
            model = parallel.parallelize_module(model, mesh["inner"], plan)
            mesh = mesh["outer"] if len(shape) == 2 else mesh
        if "DDP" in self.adapters:
            return nn.parallel.DistributedDataParallel(model)
        if "FSDP1" in self.adapters:
            hybrid: dict[str, Any] = {
                "device_mesh": mesh,
                "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
            }
            return FullyShardedDataParallel(
                model,
                device_id=device,
                use_orig_params=True,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                **(hybrid if len(shape) == 2 else {}),
            )
        for layer in (*model.children(), model) if "FSDP2" in self.adapters else ():
            fully_shard(layer, mesh=mesh)  # in place
        return model


WRAPPINGS = (
    Wrapping("plain", ("Module",), batch_axes=()),
    Wrapping("DDP", ("DDP",)),
    Wrapping("FSDP1", ("FSDP1",), min_ranks=2),
    Wrapping("FSDP1 hybrid", ("FSDP1",), min_ranks=4, num_axes=2, batch_axes=(0, 1)),
    Wrapping("FSDP2", ("FSDP2", "DTensor")),
    Wrapping("HSDP", ("FSDP2", "DTensor"), min_ranks=4, num_axes=2, batch_axes=(0, 1)),
    Wrapping("TP", ("DTensor",), batch_axes=()),
    Wrapping("FSDP2 + TP", ("FSDP2", "DTensor"), min_ranks=4, num_axes=2),
)


@dataclass(frozen=True)
class Case:
    """The argument of every check: one way to wrap models, on this rank.

    Attributes:
        wrapping: how models are wrapped.
        device: of this rank.
    """

    wrapping: Wrapping
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size()

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, wrapped."""
        return self.wrapping.wrap(model.to(self.device), self.device, self.num_ranks)

    def indices(self) -> list[np.ndarray]:
        """For each of ``WEIGHTS``, the row-major indices of this rank's elements."""
        model = self.wrapped(net("indices", self.num_ranks))
        return [local_values(module, name).astype(np.int64) for module, name in weights_of(model)]


def weights_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The (module, name) pairs of ``WEIGHTS``, found without distprune."""
    modules = {name.split(".")[-1]: module for name, module in model.named_modules()}
    layers = [modules[name.split(".")[0]] for name in WEIGHTS]
    # FSDP1 registers the wrapped module one level below.
    return [(getattr(layer, "module", layer), "weight") for layer in layers]


def local_values(module: nn.Module, name: str) -> np.ndarray:
    """A copy of this rank's part of a parameter or mask."""
    tensor = local_tensor(getattr(module, name).detach())
    return tensor.clone().cpu().numpy()


def reference_masks(
    values: Sequence[np.ndarray], amount: int | float, keeps: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Masks (True: keep) after one more pruning of whole parameters by magnitude.

    The order is (magnitude, position in the list, row-major index), among the elements that are
    not pruned yet; exactly ``amount`` elements, or this share of them, are pruned.
    """
    sizes = [whole.size for whole in values]
    magnitudes = np.abs(np.concatenate([whole.reshape(-1) for whole in values]).astype(np.float64))
    positions = np.repeat(np.arange(len(sizes)), sizes)
    indices = np.concatenate([np.arange(size) for size in sizes])
    kept = np.concatenate([keep.reshape(-1) for keep in keeps])
    order = np.lexsort((indices, positions, magnitudes))
    order = order[kept[order]]
    k = amount if isinstance(amount, int) else round(amount * len(order))
    kept[order[:k]] = False
    parts = np.split(kept, np.cumsum(sizes)[:-1])
    return [part.reshape(whole.shape) for part, whole in zip(parts, values, strict=True)]
