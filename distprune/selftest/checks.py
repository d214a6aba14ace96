"""The checks of the self-test, the small models that they prune, and every way to wrap these.

Each check is collective over all ranks. It yields a sentence for each problem on this rank, and
raises nothing for it: the other ranks would wait for a rank that leaves in the middle.

The reference is numpy and one sort. The elements of a rank are determined without distprune: a
copy of the model is filled with the index of each element and wrapped in the same way, so that the
rank's part of it *is* the list of its indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import distprune
from distprune._common.pruned_form import is_dtensor, mask_key, orig_key
from distprune.selftest import libraries
from distprune.torch_private import private_fields
from distprune.torch_private.wrapper import managed_parameters

_AMOUNTS = (0.3, 17, 0.5)  # of successive prunings
_RTOL, _ATOL = 1e-4, 1e-5  # for sums, whose order depends on the ranks
_TRAFFIC_LIMIT = 256_000  # bytes that one pruning may send per rank, whatever the model's size
_LABELS = ("l1.weight", "l2.weight", "l3.weight")
# What the parameters of a model are, made of normal random numbers.
_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "distinct": lambda normal: normal,
    "tied": lambda normal: (normal * 4).round() / 4,
    "equal": lambda normal: torch.full_like(normal, 0.5).copysign(normal),
    "indices": lambda normal: torch.arange(1.0 * normal.numel()).view_as(normal),
}


class Net(nn.Module):
    """Three linear layers; most numbers of ranks do not divide their 10 and 5 rows.

    Attributes:
        layers: the three, also when a wrapper has taken their places.
    """

    def __init__(self, num_inputs: int, num_hidden: int) -> None:
        super().__init__()
        self.l1 = nn.Linear(num_inputs, num_hidden)
        self.l2 = nn.Linear(num_hidden, 10)
        self.l3 = nn.Linear(10, 5)
        self.layers: tuple[nn.Linear, ...] = (self.l1, self.l2, self.l3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.l3(torch.tanh(self.l2(torch.relu(self.l1(x)))))
        return output

    def local(self, name: Callable[[str], str] = lambda name: name) -> list[np.ndarray]:
        """Copies of this rank's parts of the weights, or of tensors beside them; 1-d."""
        tensors = [libraries.held(getattr(layer, name("weight"))) for layer in self.layers]
        return [tensor.clone().cpu().numpy().reshape(-1) for tensor in tensors]


@dataclass(frozen=True)
class Wrapping:
    """One way to wrap a model.

    Attributes:
        name: its name in the table.
        adapters: the adapters whose private fields it needs, keys of torch_private.private_fields.
        min_ranks: the smallest number of ranks.
        num_axes: number of mesh axes; two axes need an even number of ranks.
        num_alike: number of ranks that get the same part of a batch; 0: all.
        library: that has to be installed; "" if torch is enough.
    """

    name: str
    adapters: tuple[str, ...]
    min_ranks: int = 1
    num_axes: int = 1
    num_alike: int = 1
    library: str = ""


WRAPPINGS = (
    Wrapping("plain", ("Module",), num_alike=0),
    Wrapping("DDP", ("DDP",)),
    Wrapping("FSDP1", ("FSDP1",), min_ranks=2),
    Wrapping("FSDP1 hybrid", ("FSDP1",), min_ranks=4, num_axes=2),
    Wrapping("FSDP2", ("FSDP2", "DTensor")),
    Wrapping("HSDP", ("FSDP2", "DTensor"), min_ranks=4, num_axes=2),
    Wrapping("replicate", ("FSDP2", "DTensor")),
    Wrapping("TP", ("DTensor",), num_alike=0),
    Wrapping("FSDP2 + TP", ("FSDP2", "DTensor"), min_ranks=4, num_axes=2, num_alike=2),
    Wrapping("ZeRO-1", (), library="deepspeed"),
    Wrapping("ZeRO-2", (), library="deepspeed"),
    Wrapping("ZeRO-3", ("DeepSpeed",), library="deepspeed"),
    Wrapping("HF FSDP", ("FSDP2", "DTensor"), min_ranks=2, library="transformers"),
    Wrapping("HF TP", ("DTensor",), min_ranks=2, num_alike=0, library="transformers"),
)


@dataclass
class Case:
    """The argument of every check: one way to wrap models, on this rank.

    Attributes:
        detail: a few words about a measurement, from the check; shown instead of "ok".
    """

    wrapping: Wrapping
    device: torch.device
    rank: int
    num_ranks: int
    detail: str = ""

    @torch.no_grad()
    def net(self, values: str, *, num_inputs: int = 6) -> Net:
        """A model on this rank's device, the same on every rank.

        Args:
            values: a key of ``_VALUES``.
            num_inputs: width of the first layer.
        """
        # Tensor parallelism splits the hidden units.
        net = Net(num_inputs, self.num_ranks * -(-2 * num_inputs // self.num_ranks))
        generator = torch.Generator().manual_seed(0)
        for parameter in net.parameters():
            normal = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_VALUES[values](normal))
        return net.to(self.device)

    def wrap(self, net: Net) -> nn.Module:
        """The model, wrapped."""
        if self.wrapping.library == "deepspeed":
            return libraries.zero(net, stage=int(self.wrapping.name[-1]))
        if self.wrapping.library == "transformers":
            axis = "tp_size" if "TP" in self.wrapping.name else "fsdp_size"
            model = libraries.distributed_by_transformers(net, **{axis: self.num_ranks})
            net.layers = tuple(each for each in model.children() if isinstance(each, nn.Linear))
            return model
        from torch.distributed._composable.replicate_with_fsdp import replicate
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        from torch.distributed.tensor import parallel

        adapters, is_2d = self.wrapping.adapters, self.wrapping.num_axes == 2
        shape = (self.num_ranks // 2, 2) if is_2d else (self.num_ranks,)
        names = ("outer", "inner")[-len(shape) :]
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        if "TP" in self.wrapping.name:
            plan = {"l1": parallel.ColwiseParallel(), "l2": parallel.RowwiseParallel()}
            parallel.parallelize_module(net, mesh["inner"], plan)
            mesh = mesh["outer"] if is_2d else mesh
        if "DDP" in adapters:
            return nn.parallel.DistributedDataParallel(net)
        if "FSDP1" in adapters:
            return FullyShardedDataParallel(
                net,
                device_id=self.device,
                use_orig_params=True,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                device_mesh=mesh if is_2d else None,
                sharding_strategy=ShardingStrategy.HYBRID_SHARD if is_2d else None,
            )
        shard = replicate if self.wrapping.name == "replicate" else fully_shard
        for layer in (*net.children(), net) if "FSDP2" in adapters else ():
            shard(layer, mesh=mesh)  # in place
        return net

    def indices(self) -> list[np.ndarray]:
        """For each weight, the row-major indices of this rank's elements."""
        net = self.net("indices")
        self.wrap(net)
        return [part.astype(np.int64) for part in net.local()]

    def part(self) -> tuple[int, int]:
        """(index of this rank's part of a batch, number of parts)."""
        num_alike = self.wrapping.num_alike or self.num_ranks
        return self.rank // num_alike, self.num_ranks // num_alike


def reference_masks(
    values: list[np.ndarray], amount: int | float, keeps: list[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Masks (True: keep) after one more pruning of whole parameters by magnitude.

    The order is (magnitude, position in the list, row-major index), among the elements that are
    not pruned yet; exactly ``amount`` elements, or this share of them, are pruned.
    """
    magnitudes = np.abs(np.concatenate(values))
    kept = np.ones(len(magnitudes), bool) if keeps is None else np.concatenate(keeps)
    order = np.argsort(magnitudes, kind="stable")
    order = order[kept[order]]
    kept[order[: amount if isinstance(amount, int) else round(amount * len(order))]] = False
    return np.split(kept, np.cumsum([len(whole) for whole in values])[:-1])


def check_private_fields(case: Case) -> Iterator[str]:
    """The private fields and functions of torch exist."""
    net, adapters = case.net("distinct"), case.wrapping.adapters
    model = case.wrap(net)
    missing = [name for adapter in adapters for name in private_fields.missing_names(adapter)]
    missing += private_fields.missing_fields("Module", {"Module": model})
    if "DDP" in adapters:
        missing += private_fields.missing_fields("DDP", {"DistributedDataParallel": model})
    for parameter in filter(is_dtensor, model.parameters()):
        missing += private_fields.missing_fields("DTensor", {"DTensor": parameter})
    if "FSDP2" in adapters:
        missing += private_fields.missing_states(model)
    for name in dict.fromkeys(missing):
        yield f"torch has no {name}"
    managed = managed_parameters(model)
    is_sharded = bool({"FSDP1", "FSDP2", "DeepSpeed"} & set(adapters))
    if is_sharded and any((id(layer), "weight") not in managed for layer in net.layers):
        yield "parameters are not found in the wrapper"
    for record in managed.values():
        try:
            record.check_fields()
        except NotImplementedError as error:
            yield str(error)
            return


def check_masks(case: Case) -> Iterator[str]:
    """Masks by magnitude are those of one process, bit for bit, ties included."""
    indices = case.indices()
    for kind in ("distinct", "tied", "equal"):
        net = case.net(kind)
        values, keeps, num_pruned = net.local(), None, 0
        model = case.wrap(net)
        for amount in _AMOUNTS:
            keeps = reference_masks(values, amount, keeps)
            expected = sum(int((~keep).sum()) for keep in keeps) - num_pruned
            num_pruned += expected
            when, found = f"{kind} values, amount {amount}", _prune(model, amount).num_pruned_now
            if found != expected:
                yield f"{when}: {found} elements were pruned, expected {expected}"
            yield from _wrong_masks(net, keeps, indices, when)


def check_traffic(case: Case) -> Iterator[str]:
    """A pruning sends kilobytes, however large the model is."""
    model = case.wrap(case.net("distinct", num_inputs=512))
    with _Traffic() as traffic:  # type: ignore[no-untyped-call]
        _prune(model, 0.5)
    case.detail = f"{traffic.num_bytes / 1000:.0f} kB"
    if traffic.num_bytes > _TRAFFIC_LIMIT:
        yield f"one pruning sent {case.detail}; expected at most {_TRAFFIC_LIMIT / 1000:.0f} kB"


def check_all_or_none(case: Case) -> Iterator[str]:
    """When one rank passes another amount, every rank raises and nothing changes."""
    indices, net = case.indices(), case.net("tied")
    values = net.local()
    model = case.wrap(net)
    before = _state_of(model)
    try:
        _prune(model, 0.25 if case.rank == case.num_ranks - 1 else 0.5)
        yield "amounts that differ between the ranks raised no error here"
    except ValueError as error:
        if "amount" not in str(error):
            yield f"the error does not name the amount: {error}"
    if _state_of(model) != before:
        yield "the model has changed although the ranks' amounts differ"
        return
    _prune(model, 0.5)  # goes on as if nothing had been
    yield from _wrong_masks(net, reference_masks(values, 0.5), indices, "after the error")


def check_training(case: Case) -> Iterator[str]:
    """A step of training is that of a dense model with masked weights, and the zeros stay."""
    indices, dense, net = case.indices(), case.net("distinct"), case.net("distinct")
    values = net.local()
    keeps = reference_masks(values, 0.5)
    model = case.wrap(net)
    is_engine = case.wrapping.library == "deepspeed"
    # On a GPU torch steps lists of parameters by default, and refuses DTensors beside others.
    kinds = {is_dtensor(parameter) for parameter in model.parameters()}
    foreach = False if len(kinds) > 1 else None
    optimizer = torch.optim.SGD(model.parameters(), libraries.LEARNING_RATE, foreach=foreach)
    _prune(model, 0.5)
    # The gradient of a masked weight is that of its product with the mask, masked.
    for layer, keep in zip(dense.layers, keeps, strict=True):
        mask = torch.from_numpy(keep).to(layer.weight).view_as(layer.weight)
        layer.weight.detach().mul_(mask)
        layer.weight.register_hook(mask.mul)  # type: ignore[no-untyped-call]

    index, num_parts = case.part()
    generator = torch.Generator().manual_seed(7)
    batch = torch.randn(4 * num_parts, 6, generator=generator).to(case.device)
    rows = slice(4 * index, 4 * index + 4)
    output, expected = model(batch[rows]), dense(batch)
    yield from _far("the output", output.detach(), expected.detach()[rows])
    loss = output.square().sum(1).mean()
    (model if is_engine else torch.autograd).backward(loss)  # type: ignore[operator]
    (model if is_engine else optimizer).step()  # type: ignore[operator]
    torch.autograd.backward(expected.square().sum(1).mean())
    torch.optim.SGD(dense.parameters(), libraries.LEARNING_RATE).step()
    rest = zip(_LABELS, net.local(orig_key), dense.local(), values, keeps, indices, strict=True)
    for label, mine, trained, old, keep, own in rest:
        keep, old = keep[own], old[own]
        yield from _far(f"{label} after a step", mine[keep], trained[own][keep])
        if not np.array_equal(mine[~keep], 0 * old[~keep] if is_engine else old[~keep]):
            yield f"a step changed pruned elements of {label}"
    with torch.no_grad():
        yield from _far("the output after a step", model(batch[rows]), dense(batch)[rows])


# In the order in which they run; the names are the columns of the table.
CHECKS: dict[str, Callable[[Case], Iterator[str]]] = {
    "private fields": check_private_fields,
    "masks": check_masks,
    "traffic": check_traffic,
    "all or none": check_all_or_none,
    "training": check_training,
}
NEEDS_TWO_RANKS = "all or none"


def _prune(model: nn.Module, amount: int | float) -> distprune.PruningReport:
    selected = distprune.select(model)
    return distprune.global_unstructured(selected, distprune.L1Unstructured, amount=amount)


def _wrong_masks(
    net: Net, keeps: list[np.ndarray], indices: list[np.ndarray], when: str
) -> Iterator[str]:
    """Compare this rank's masks with its parts of the whole masks, bit for bit."""
    for label, mask, keep, own in zip(_LABELS, net.local(mask_key), keeps, indices, strict=True):
        differs = (mask != 0) != keep[own]
        if differs.any():
            yield (
                f"{when}: {int(differs.sum())} of {differs.size} mask elements of {label} on this "
                f"rank differ from the reference, the first at index {int(own[differs][0])} of "
                "the whole parameter"
            )


def _far(what: str, actual: Any, expected: Any) -> Iterator[str]:
    """A problem if two arrays or tensors differ by more than rounding."""
    actual, expected = (torch.as_tensor(values).cpu().numpy() for values in (actual, expected))
    if not np.allclose(actual, expected, rtol=_RTOL, atol=_ATOL):
        distance = float(np.abs(actual - expected).max())
        yield f"{what} differs from the reference by up to {distance:.3g}"


def _state_of(model: nn.Module) -> list[Any]:
    """Everything that a pruning may change, for comparison with ==."""
    names = [
        [name, *module._parameters, *module._buffers, *module._forward_pre_hooks]
        for name, module in model.named_modules()
    ]
    parts = [libraries.held(parameter) for parameter in model.parameters()]
    return [names, [part.cpu().numpy().tobytes() for part in parts]]


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts the bytes of the tensors of collectives that the dispatcher runs."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if "c10d" in func.namespace and name not in ("wait_tensor", "monitored_barrier_"):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.num_bytes += sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))
