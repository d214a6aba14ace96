"""The checks of the self-test, the small models that they prune, and every way to wrap these.

Each check is collective over all ranks. It yields a sentence for each problem on this rank, and
raises nothing for it: the other ranks would wait for a rank that leaves in the middle.

The reference is numpy and one sort. The elements of a rank are determined without distprune: a
copy of the model is filled with the index of each element and wrapped in the same way, so that the
rank's part of it *is* the list of its indices.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
_LEARNING_RATE = 0.1  # of SGD, which DeepSpeed has to know when it wraps a model
_LABELS = ("l1.weight", "l2.weight", "l3.weight")
# What the parameters of a model are, made of normal random numbers.
_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "distinct": lambda normal: normal,
    "tied": lambda normal: (normal * 4).round() / 4,
    "equal": lambda normal: torch.full_like(normal, 0.5).copysign(normal),
    "indices": lambda normal: torch.arange(1.0 * normal.numel()).view_as(normal),
}


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


def _layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _held(tensor: Tensor) -> Tensor:
    """What this rank has of a parameter, 1-d if ZeRO-3 has cut it, or of a tensor beside it."""
    part: Any = getattr(tensor, "ds_tensor", None)
    if part is None:
        return local_tensor(tensor.detach())
    rest = tensor.ds_numel - dist.get_rank() * part.numel()  # type: ignore[attr-defined]
    run: Tensor = part.detach()[: max(0, rest)]
    return run


def _local(model: nn.Module, key: str = "weight") -> list[np.ndarray]:
    """Copies of this rank's parts of the weights, or of tensors beside them; 1-d."""
    tensors = [_held(getattr(layer, key)) for layer in _layers(model)]
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
    def net(self, values: str, num_inputs: int = 6) -> Net:
        """A model on this rank's device, the same on every rank; ``values`` as in ``_VALUES``."""
        # Tensor parallelism splits the hidden units.
        net = Net(num_inputs, self.num_ranks * -(-2 * num_inputs // self.num_ranks))
        generator = torch.Generator().manual_seed(0)
        for parameter in net.parameters():
            parameter.copy_(_VALUES[values](torch.randn(parameter.shape, generator=generator)))
        return net.to(self.device)

    def wrap(self, net: Net) -> nn.Module:
        """The model, wrapped."""
        if self.wrapping.library == "deepspeed":
            return _engine(net, stage=int(self.wrapping.name[-1]))
        if self.wrapping.library == "transformers":
            axis = "tp_size" if "TP" in self.wrapping.name else "fsdp_size"
            return _distributed_by_transformers(net, {axis: self.num_ranks})
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
            options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
            if is_2d:
                options |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
            return FullyShardedDataParallel(
                net, device_id=self.device, use_orig_params=True, **options
            )
        shard = replicate if self.wrapping.name == "replicate" else fully_shard
        for layer in (*net.children(), net) if "FSDP2" in adapters else ():
            shard(layer, mesh=mesh)  # in place
        return net


def why_not(library: str, device: torch.device, backend: str) -> str:
    """Why the wrappers of a library cannot be tried on this rank; "" if they can."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and (device.type == "cpu" or backend == "gloo"):
        return f"{library} takes an accelerator for each rank"
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        _imported(library)
    except Exception as error:  # libraries raise what they like
        return f"needs {library}: {error}"
    return ""


def _imported(library: str) -> Any:
    """A library, whose log does not go to the standard output; AttributeError: it is too old."""
    with contextlib.redirect_stdout(sys.stderr):
        module: Any = importlib.import_module(library)
    if library == "transformers":
        _ = module.DistributedConfig.efsdp_size  # before 5.23 not all of a model is distributed
        module.utils.logging.disable_progress_bar()
        module.utils.logging.set_verbosity_error()
    if library == "deepspeed":
        module.utils.logger.setLevel("ERROR")
    return module


def _engine(net: nn.Module, stage: int) -> nn.Module:
    """DeepSpeed's engine for a model, with SGD."""
    deepspeed = _imported("deepspeed")
    # Nothing is compiled: for ranks of one machine it is a faster all-reduce, after minutes.
    _imported("deepspeed.comm.torch").build_shm_op = lambda: None
    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    optimizer, linear = torch.optim.SGD(net.parameters(), _LEARNING_RATE), nn.functional.linear
    try:
        engine: nn.Module = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    finally:
        nn.functional.linear = linear  # ZeRO-3 replaces it for all that comes later
    return engine


def _distributed_by_transformers(net: Net, sizes: dict[str, int]) -> nn.Module:
    """A model with the layers of another one, saved, and loaded with ``distributed_config``."""
    transformers = _imported("transformers")

    class Pretrained(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
        config_class = transformers.PretrainedConfig
        forward = Net.forward

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._modules |= Net(net.l1.in_features, net.l1.out_features)._modules
            self.post_init()

    config = transformers.DistributedConfig(
        tp_plan={"l1": "colwise", "l2": "rowwise"},
        fsdp_plan=dict.fromkeys(("l1", "l2", "l3"), "free_full_weight"),
        **sizes,
    )
    model: nn.Module = Pretrained.from_pretrained(
        None,
        config=transformers.PretrainedConfig(),
        state_dict=net.state_dict(),
        distributed_config=config,
    )
    return model


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
        report, num_kept = _prune(self.model, amount), sum(keep.sum() for keep in self.keeps)
        # The order is (magnitude, position in the list, row-major index), among the elements that
        # are not pruned yet; exactly ``amount`` elements, or this share of them, are pruned.
        kept = np.concatenate(self.keeps)
        order = np.argsort(np.abs(np.concatenate(self.values)), kind="stable")
        order = order[kept[order]]
        kept[order[: amount if isinstance(amount, int) else round(amount * len(order))]] = False
        self.keeps = np.split(kept, np.cumsum([len(whole) for whole in self.values])[:-1])
        expected = int(num_kept - kept.sum())
        if report.num_pruned_now != expected:
            yield f"{when}: {report.num_pruned_now} elements were pruned, expected {expected}"
        masks = _local(self.model, mask_key("weight"))
        for label, mask, keep, own in zip(_LABELS, masks, self.keeps, self.own, strict=True):
            differs = (mask != 0) != keep[own]
            if differs.any():
                yield (
                    f"{when}: {int(differs.sum())} of {differs.size} mask elements of {label} on "
                    f"this rank differ from the reference, the first at index "
                    f"{int(own[differs][0])} of the whole parameter"
                )


def check_private_fields(case: Case) -> Iterator[str]:
    """The private fields and functions of torch exist."""
    adapters, model = case.wrapping.adapters, case.wrap(case.net("distinct"))
    missing = [name for adapter in adapters for name in private_fields.missing_names(adapter)]
    missing += private_fields.missing_fields("Module", {"Module": model})
    if "DDP" in adapters:
        missing += private_fields.missing_fields("DDP", {"DistributedDataParallel": model})
    for parameter in filter(is_dtensor, model.parameters()):
        missing += private_fields.missing_fields("DTensor", {"DTensor": parameter})
    if "FSDP2" in adapters:
        missing += private_fields.missing_states(model)
    yield from (f"torch has no {name}" for name in dict.fromkeys(missing))
    managed = managed_parameters(model)
    is_sharded = not {"FSDP1", "FSDP2", "DeepSpeed"}.isdisjoint(adapters)
    if is_sharded and any((id(layer), "weight") not in managed for layer in _layers(model)):
        yield "parameters are not found in the wrapper"
    for record in managed.values():
        try:
            record.check_fields()
        except NotImplementedError as error:
            yield str(error)
            return


def check_masks(case: Case) -> Iterator[str]:
    """Masks by magnitude are those of one process, bit for bit, ties included."""
    for values in ("distinct", "tied", "equal"):
        subject = Subject(case, values)
        for amount in _AMOUNTS:
            yield from subject.prune(amount, f"{values} values, amount {amount}")


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
    subject = Subject(case, "tied")
    before = _state_of(subject.model)
    try:
        _prune(subject.model, 0.25 if case.rank == case.num_ranks - 1 else 0.5)
        yield "amounts that differ between the ranks raised no error here"
    except ValueError as error:
        if "amount" not in str(error):
            yield f"the error does not name the amount: {error}"
    if _state_of(subject.model) == before:
        yield from subject.prune(0.5, "after the error")  # goes on as if nothing had been
    else:
        yield "the model has changed although the ranks' amounts differ"


def check_training(case: Case) -> Iterator[str]:
    """A step of training is that of a dense model with masked weights, and the zeros stay."""
    dense, subject = case.net("distinct"), Subject(case, "distinct")
    model, is_engine = subject.model, case.wrapping.library == "deepspeed"
    # On a GPU torch steps lists of parameters by default, and refuses DTensors beside others.
    kinds = {is_dtensor(parameter) for parameter in model.parameters()}
    foreach = False if len(kinds) > 1 else None
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE, foreach=foreach)
    yield from subject.prune(0.5, "before the step")
    # The gradient of a masked weight is that of its product with the mask, masked.
    for layer, keep in zip(_layers(dense), subject.keeps, strict=True):
        mask = torch.from_numpy(keep).to(layer.weight).view_as(layer.weight)
        layer.weight.detach().mul_(mask)
        layer.weight.register_hook(mask.mul)  # type: ignore[no-untyped-call]

    num_alike = case.wrapping.num_alike or case.num_ranks
    generator = torch.Generator().manual_seed(7)
    batch = torch.randn(4 * (case.num_ranks // num_alike), 6, generator=generator).to(case.device)
    first = 4 * (case.rank // num_alike)
    rows = slice(first, first + 4)
    output, expected = model(batch[rows]), dense(batch)
    yield from _far("the output", output.detach(), expected.detach()[rows])
    loss = output.square().sum(1).mean()
    (model if is_engine else torch.autograd).backward(loss)  # type: ignore[operator]
    (model if is_engine else optimizer).step()  # type: ignore[operator]
    torch.autograd.backward(expected.square().sum(1).mean())
    torch.optim.SGD(dense.parameters(), _LEARNING_RATE).step()
    weights = _local(model, orig_key("weight")), _local(dense), subject.values, subject.keeps
    for label, own, mine, *whole in zip(_LABELS, subject.own, *weights, strict=True):
        trained, old, keep = (values[own] for values in whole)
        yield from _far(f"{label} after a step", mine[keep], trained[keep])
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
    return [names, [_held(parameter).cpu().numpy().tobytes() for parameter in model.parameters()]]


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts the bytes of the tensors of collectives that the dispatcher runs."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if "c10d" in func.namespace and name not in ("wait_tensor", "monitored_barrier_"):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.num_bytes += sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))
