"""From a module's parameter, however it is wrapped, to this rank's LocalShard.

Reads and changes nothing. The owning wrapper is looked for first and the type of
the tensor second: after an evaluation FSDP2's root has plain gathered tensors
registered, which look like replicas.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from distprune.shard import LocalShard

_FLOAT8 = tuple(
    getattr(torch, name)
    for name in dir(torch)
    if name.startswith("float8") and isinstance(getattr(torch, name), torch.dtype)
)


class ShardReader:
    """Reads the parameters of one call.

    Args:
        replica, num_replicas: this rank's place among the ranks of the call, for
            parameters that every rank holds whole.
    """

    def __init__(self, replica: int = 0, num_replicas: int = 1) -> None:
        self._replica = replica
        self._num_replicas = num_replicas
        self._managed = _fsdp2_parameters()

    def managed(self, module: nn.Module, name: str) -> Any | None:
        """FSDP2's record (wrappers.fsdp2.ManagedParameter) of a parameter, pruned or not."""
        for registered in (name, name + "_orig"):
            found = self._managed.get((id(module), registered))
            if found is not None:
                return found
        return None

    def read(self, module: nn.Module, name: str, label: str) -> LocalShard:
        """This rank's part of ``module.name``.

        Raises:
            AttributeError: no such attribute.
            TypeError: not a parameter.
            NotImplementedError: a layout, dtype or wrapper that is not supported.
        """
        managed = self.managed(module, name)
        parameter = managed.sharded if managed is not None else _registered(module, name, label)
        mask = module._buffers.get(name + "_mask")
        _check_kind(label, parameter)
        if managed is not None:
            _check_managed(label, managed, mask)
        if is_dtensor(parameter):
            from distprune.sharding import dtensor

            if mask is not None and not is_dtensor(mask):
                raise NotImplementedError(
                    f"{label}: the parameter was sharded after it had been pruned, and its mask "
                    "is still whole on every rank. Expected the model to be wrapped first and "
                    "pruned second; remove() the pruning before wrapping."
                )
            return dtensor.local_shard(label, parameter, mask)
        from distprune.sharding import replicated

        return replicated.local_shard(label, parameter, mask, self._replica, self._num_replicas)


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, without importing DTensor for those who have none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(module: nn.Module, name: str) -> bool:
    """Whether ``module.name`` is sharded, so that one rank alone cannot prune it."""
    parameters = module._parameters
    if any(is_dtensor(parameters.get(key)) for key in (name, name + "_orig")):
        return True
    return ShardReader().managed(module, name) is not None


def local_part(label: str, what: str, tensor: Tensor, shard: LocalShard) -> Tensor:
    """This rank's part of scores or of a mask given whole, or as a DTensor like the parameter.

    Raises:
        ValueError: a shape or a layout other than the parameter's.
    """
    if is_dtensor(tensor):
        from distprune.sharding import dtensor

        return dtensor.local_part(label, what, tensor, shard)
    if tensor.shape != shard.shape:
        raise ValueError(
            f"{label}: {what} has shape {tuple(tensor.shape)}; expected the whole parameter's "
            f"shape {tuple(shard.shape)}."
        )
    return shard.slice_of(tensor.detach()).to(shard.values.device)


def _fsdp2_parameters() -> dict[tuple[int, str], Any]:
    if "torch.distributed.fsdp" not in sys.modules:
        return {}
    from distprune.wrappers import fsdp2

    return fsdp2.managed_parameters()


def _registered(module: nn.Module, name: str, label: str) -> Tensor:
    """The parameter behind a name, by its own name or, when pruned, as name_orig."""
    if "torch.distributed.fsdp" in sys.modules:
        from distprune.wrappers import fsdp1

        if fsdp1.is_managed(module, name):
            raise NotImplementedError(
                f"{label}: the parameter is a piece of an FSDP1 flat parameter "
                "(FullyShardedDataParallel), which is not supported yet. Use fully_shard "
                "(FSDP2), or DistributedDataParallel."
            )
    for key in (name + "_orig", name):
        parameter = module._parameters.get(key)
        if parameter is not None and (key == name or name + "_mask" in module._buffers):
            return parameter
    found = getattr(module, name)  # AttributeError, as in torch
    raise TypeError(
        f"{label} is {'None' if found is None else f'a {type(found).__name__}'}; "
        "expected a parameter of the module."
    )


def _check_kind(label: str, parameter: Tensor) -> None:
    problem = None
    if parameter.is_quantized or parameter.dtype in _FLOAT8:
        problem = f"dtype {parameter.dtype} is quantised; dequantise the parameter first"
    elif parameter.layout is not torch.strided:
        problem = f"layout {parameter.layout} is sparse already; expected torch.strided"
    elif parameter.is_meta:
        problem = "it is on the meta device and has no values; materialise the model first"
    elif isinstance(parameter, nn.parameter.UninitializedTensorMixin):
        problem = "it is a lazy parameter without a shape; run one forward first"
    if problem:
        raise NotImplementedError(f"{label}: {problem}.")


def _check_managed(label: str, managed: Any, mask: Tensor | None) -> None:
    from distprune.wrappers import fsdp2

    fsdp2.check_fields(managed)
    if managed.unsupported:
        raise NotImplementedError(f"{label}: {managed.unsupported}.")
