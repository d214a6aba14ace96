"""From a module's parameter, however it is wrapped, to this rank's part of it, a Shard.

Reads and changes no value. The reader first asks for a wrapper's record of the parameter, and only
then for the type of the tensor: after an evaluation FSDP2's root has plain gathered tensors
registered, which look like replicas.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distprune.base.naming import unwrap
from distprune.base.pruned_form import is_dtensor, mask_key, orig_key
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import over_groups, over_mesh
from distprune.shards.checksum import checksums
from distprune.shards.geometry import memory_order, run_index_map, whole_index
from distprune.shards.shard import Shard
from distprune.wrappers.held import find_held
from distprune.wrappers.managed import Managed, ManagedDTensor, ManagedRun
from distprune.wrappers.wrapper import find_run, is_flattened, is_managed, managed_parameters


class ShardReader:
    """Reads the parameters of one call.

    Args:
        replica, num_replicas: this rank's place among the ranks of the call, for
            parameters that are whole on every rank.
    """

    def __init__(self, replica: int = 0, num_replicas: int = 1) -> None:
        self._replica = replica
        self._num_replicas = num_replicas
        # Made on demand: a call for one parameter may not need the records of all others.
        self._managed: dict[tuple[int, str], Managed] | None = None
        # By process groups: lists of ranks are long, and the same for many parameters.
        self._ranks: dict[tuple[ProcessGroup, ...], tuple[int, ...]] = {}

    def managed(self, module: nn.Module, name: str) -> Managed | None:
        """A wrapper's record of a parameter, pruned or not.

        Raises:
            NotImplementedError: the parameter belongs to an FSDP1 wrapper that is gone.
            RuntimeError: it was pruned first and sharded second.
        """
        _check_pruned_form(module, name)
        held = find_held(module, name)
        if held is not None and held.record is not None:
            return held.record
        run = find_run(module, name)
        if run is not None:
            return run
        if self._managed is None:
            self._managed = managed_parameters()
        record = self._managed.get((id(module), name))
        if record is None and is_flattened(module, name):
            self._managed = managed_parameters(everywhere=True)
            record = self._managed.get((id(module), name))
            if record is None:
                raise NotImplementedError(
                    f"{type(module).__name__}.{name} is a piece of an FSDP1 flat parameter whose "
                    "FullyShardedDataParallel module is gone; expected that the wrapped model is "
                    "kept and used, not the module inside it."
                )
        return record

    def read(self, module: nn.Module, name: str, label: str) -> Shard:
        """This rank's part of ``module.name``.

        Raises:
            AttributeError: no such attribute.
            TypeError: not a parameter.
            NotImplementedError: a layout, dtype or wrapper that is not supported.
        """
        managed, mask = self.managed(module, name), module._buffers.get(mask_key(name))
        if managed is not None and managed.unsupported:
            raise NotImplementedError(f"{label}: {managed.unsupported}.")
        if isinstance(managed, ManagedRun):
            return self._read_run(managed, label, mask)
        if isinstance(managed, ManagedDTensor):
            return self.read_tensor(managed.sharded, label, mask, managed)
        return self.read_tensor(_registered(module, name, label), label, mask)

    def _read_run(self, run: ManagedRun, label: str, mask: Tensor | None) -> Shard:
        """This rank's run of a parameter, whose mask is a run, too."""
        index = run_index_map(run.shape, run.stride, run.start)
        if index is None:
            raise NotImplementedError(
                f"{label}: a parameter of shape {tuple(run.shape)} and stride {tuple(run.stride)} "
                "overlaps itself or has gaps; expected one that is dense in memory."
            )
        groups, (replica, num_replicas), values = tuple(run.groups), run.replica, run.values
        if groups not in self._ranks:
            self._ranks[groups] = run.ranks
        return Shard(
            name=label,
            parameter=values,
            values=values,
            # FSDP1 with CPU offload moves masks to the accelerator, as all buffers, and not values.
            mask=None if mask is None else mask.detach().to(values.device),
            shape=run.shape,
            index=index,
            is_run=True,
            replica=replica,
            num_replicas=num_replicas,
            ranks=self._ranks[groups],
            layout=run.layout,
            key=run.key,
            managed=run,
        )

    def read_tensor(
        self,
        parameter: Tensor,
        label: str,
        mask: Tensor | None = None,
        managed: ManagedDTensor | None = None,
    ) -> Shard:
        """This rank's part of a tensor: of a DTensor, or the whole of any other one.

        Args:
            parameter: a parameter, or another tensor that is laid out like one.
            label: its name, for messages.
            mask: the mask in force, laid out as the parameter.
            managed: the record of ``fully_shard``, if it has cut it.

        Raises:
            NotImplementedError: a layout or a dtype that is not supported.
        """
        _check_kind(label, parameter)
        if is_dtensor(parameter):
            from distprune.shards import dtensor

            return dtensor.local_shard(
                label, parameter, mask, managed, is_from_fsdp2=managed is not None
            )
        values = parameter.detach()
        # One with gaps or overlaps is copied when it is read, row by row.
        order = None if values.is_contiguous() else memory_order(values)
        return Shard(
            name=label,
            parameter=parameter,
            values=values,
            mask=None if mask is None else mask.detach(),
            shape=values.shape,
            index=whole_index(values.shape, None if order is None else tuple(order)),
            replica=self._replica,
            num_replicas=self._num_replicas,
            key=id(parameter),
        )

    def identity(self, module: nn.Module, name: str) -> tuple[Hashable, torch.Size]:
        """What is the same for all names of a parameter, and its global shape.

        Raises:
            AttributeError: no such attribute.
            TypeError: not a parameter.
        """
        module = unwrap(module)
        managed = self.managed(module, name)
        if managed is not None:
            return managed.key, managed.shape
        parameter = _registered(module, name, f"{type(module).__name__}.{name}")
        return id(parameter), parameter.shape

    def communicator(self, module: nn.Module, name: str) -> Communicator:
        """The ranks over which a sharded parameter is spread."""
        managed = self.managed(module, name)
        if isinstance(managed, ManagedRun):
            return over_groups(managed.groups, managed.ranks)
        registered = module._parameters.get(name)
        parameter = managed.sharded if isinstance(managed, ManagedDTensor) else registered
        assert is_dtensor(parameter)
        return over_mesh(parameter.device_mesh)


def is_sharded(module: nn.Module, name: str) -> bool:
    """Whether ``module.name`` is sharded, so that one rank alone cannot prune it."""
    if is_dtensor(module._parameters.get(name)):
        return True
    return ShardReader().managed(module, name) is not None


def local_part(label: str, what: str, tensor: Tensor, shard: Shard) -> Tensor:
    """This rank's part of scores or of a mask, from a whole tensor or a DTensor like the parameter.

    Raises:
        ValueError: a shape or a layout other than the parameter's.
    """
    if is_dtensor(tensor):
        laid_out = tensor.shape, tensor.device_mesh, tuple(tensor.placements)
        if laid_out != (shard.shape, shard.mesh, shard.placements):
            raise ValueError(
                f"{label}: {what} is a DTensor of shape {tuple(tensor.shape)} with "
                f"{tensor.placements} on {tensor.device_mesh}; expected shape {tuple(shard.shape)} "
                f"with {shard.placements} on {shard.mesh}, as the parameter. "
                "Redistribute it, or pass the full tensor."
            )
        with torch.no_grad():
            local = tensor.to_local().detach()
        # Outside of the mesh, where DTensor has one dimension only.
        return local if local.numel() else local.new_empty(shard.values.shape)
    if tensor.shape == shard.shape:
        return shard.slice_of(tensor.detach()).to(shard.values.device)
    if shard.is_run and tensor.shape == shard.values.shape:
        return tensor.detach()  # FSDP1's own form, such as that of a gradient
    raise ValueError(
        f"{label}: {what} has shape {tuple(tensor.shape)}; expected the whole parameter's "
        f"shape {tuple(shard.shape)}."
    )


def whole_checksum(tensor: Tensor, shard: Shard) -> str:
    """A checksum of a whole tensor, which must be equal on all ranks that slice their parts of it.

    Not of a tensor that is this rank's part already: a DTensor, or 1-d under FSDP1.
    """
    is_part = is_dtensor(tensor) or (shard.is_run and tensor.ndim == 1)
    if not shard.is_sharded or is_part:
        return "each rank's part"
    return str(checksums([tensor])[0])


def unflattened(label: str, what: str, tensor: Tensor, shard: Shard) -> Tensor:
    """Whole scores that are 1-d, row-major, in the parameter's shape; any others as they are.

    Under FSDP1 a 1-d tensor of the length of this rank's run is such a run, in the order of
    memory, as a gradient is; also if the run is the whole parameter.

    Raises:
        ValueError: under FSDP1, a 1-d tensor that is no run, of a parameter whose order of memory
            is not row-major: on a rank that has the whole parameter it would be taken for a run.
    """
    if tensor.ndim != 1 or tensor.shape == shard.shape or tensor.numel() != shard.numel:
        return tensor
    if shard.is_run:
        if tensor.shape == shard.values.shape:
            return tensor
        if shard.index.start is None:
            raise ValueError(
                f"{label}: {what} is 1-d with {tensor.numel()} elements, of a parameter of shape "
                f"{tuple(shard.shape)} that is not row-major in memory (channels_last, say). There "
                "FSDP1's own 1-d form, that of a gradient, follows the order of its memory; "
                f"expected that form, {tuple(shard.values.shape)} on this rank, or the parameter's "
                "shape, which leaves no doubt: pass scores.view(shape)."
            )
    return tensor.view(shard.shape)


def _check_pruned_form(module: nn.Module, name: str) -> None:
    """Raise if a parameter in the pruned form of a plain module is sharded."""
    original = module._parameters.get(orig_key(name), module.__dict__.get(orig_key(name)))
    if original is not None and (is_dtensor(original) or is_managed(module, orig_key(name))):
        raise RuntimeError(
            f"{type(module).__name__}.{name} was pruned before it was sharded; expected a model "
            "that is pruned after it was wrapped. Wrap it inside distprune.masks_aside(model), "
            "which takes the masks off and puts them on again, sharded."
        )


def _registered(module: nn.Module, name: str, label: str) -> Tensor:
    """The parameter behind a name, by its own name or, when pruned, as name_orig."""
    for key in (orig_key(name), name):
        parameter = module._parameters.get(key)
        if parameter is not None and (key == name or mask_key(name) in module._buffers):
            return parameter
    value = getattr(module, name)  # AttributeError, as in torch
    raise TypeError(
        f"{label} is {'None' if value is None else f'a {type(value).__name__}'}; "
        "expected a parameter of the module."
    )


def _check_kind(label: str, parameter: Tensor) -> None:
    problem = None
    if parameter.is_quantized or (parameter.is_floating_point() and parameter.itemsize == 1):
        problem = f"dtype {parameter.dtype} is quantised; dequantise the parameter first"
    elif parameter.layout is not torch.strided:
        problem = f"layout {parameter.layout} is sparse already; expected torch.strided"
    elif parameter.is_meta:
        problem = "it is on the meta device and has no values; materialise the model first"
    elif nn.parameter.is_lazy(parameter):
        problem = "it is a lazy parameter without a shape; run one forward first"
    if problem:
        raise NotImplementedError(f"{label}: {problem}.")
