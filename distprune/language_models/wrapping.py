"""Spread a model that has no weights yet over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distprune._common.process_groups import is_distributed
from distprune._transformers.building import decoder_layers
from distprune.language_models.tensor_plan import parallelize

Wrap: TypeAlias = Literal["none", "ddp", "fsdp2", "tp", "fsdp2_tp"]
WRAPS: tuple[str, ...] = get_args(Wrap)
# Of meshes that are made here. PEFT takes the axis "fsdp" for one that shards storage only.
_AXES = {
    ("fsdp2", 1): ("fsdp",), ("fsdp2", 2): ("replicate", "shard"), ("tp", 1): ("tp",),
    ("fsdp2_tp", 2): ("dp", "tp"),
}  # fmt: skip


def check_wrap(wrap: str, mesh: DeviceMesh | Sequence[int] | None) -> None:
    """Raise ValueError for a wrap or a mesh that cannot be."""
    if wrap not in WRAPS:
        raise ValueError(f"wrap={wrap!r} is unknown; expected one of {', '.join(WRAPS)}.")
    if wrap in ("none", "ddp") and mesh is not None:
        raise ValueError(f"mesh={mesh!r} has no use for wrap={wrap!r}; expected None.")
    if wrap != "none" and not is_distributed():
        raise ValueError(
            f"wrap={wrap!r} needs a process group; expected torch.distributed to be initialised. "
            "Start the program by torchrun and call torch.distributed.init_process_group(), or "
            "use wrap='none'."
        )
    if wrap == "fsdp2_tp" and mesh is None:
        raise ValueError(
            "mesh=None does not say how many ranks are data-parallel and how many tensor-parallel; "
            "expected sizes, as mesh=(2, 4), or a DeviceMesh with the axes 'dp' and 'tp'."
        )
    sizes = sizes_of(mesh)
    if sizes is None:
        return
    allowed = [ndim for kind, ndim in _AXES if kind == wrap]
    if len(sizes) not in allowed:
        counts = " or ".join(map(str, allowed))
        raise ValueError(f"mesh of sizes {sizes} for wrap={wrap!r}; expected {counts} axes.")
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    if not isinstance(mesh, DeviceMesh) and torch.Size(sizes).numel() != dist.get_world_size():
        raise ValueError(
            f"mesh={sizes} has {torch.Size(sizes).numel()} ranks; expected all "
            f"{dist.get_world_size()}."
        )
    if isinstance(mesh, DeviceMesh) and wrap == "fsdp2_tp" and names != ("dp", "tp"):
        raise ValueError(f"mesh has the axes {names}; expected ('dp', 'tp').")


def sizes_of(mesh: DeviceMesh | Sequence[int] | None) -> tuple[int, ...] | None:
    """The sizes of a mesh, or of one that is described; None if none was given."""
    if mesh is None:
        return None
    shape = mesh.shape if isinstance(mesh, DeviceMesh) else mesh
    return tuple(int(size) for size in shape)


def make_mesh(
    wrap: str, mesh: DeviceMesh | Sequence[int] | None, device: torch.device
) -> DeviceMesh | None:
    """The mesh of a wrap. Collective over all ranks where it is not given."""
    if wrap in ("none", "ddp") or isinstance(mesh, DeviceMesh):
        return mesh if isinstance(mesh, DeviceMesh) else None
    sizes = sizes_of(mesh) or (dist.get_world_size(),)
    return init_device_mesh(device.type, sizes, mesh_dim_names=_AXES[wrap, len(sizes)])


def shard(model: Any, wrap: str, mesh: DeviceMesh | None) -> None:
    """Shard a model on the meta device, in place; "none" and "ddp" leave it whole.

    FSDP2 gathers one decoder layer at a time; embeddings, the last norm and the head belong to the
    root.

    Raises:
        NotImplementedError: see :func:`distprune.language_models.tensor_plan.parallelize`; or
            transformers does not say which modules are the decoder's layers.

    Cost: no memory and no communication.
    """
    if mesh is None:
        return
    if wrap == "tp":
        parallelize(model, mesh)
    if wrap == "fsdp2_tp":
        parallelize(model, mesh["tp"])
    if wrap in ("fsdp2", "fsdp2_tp"):
        from torch.distributed.fsdp import fully_shard

        over = mesh["dp"] if wrap == "fsdp2_tp" else mesh
        layers = decoder_layers(model)
        if not layers:
            raise NotImplementedError(
                f"transformers does not say which modules of {type(model).__name__} are its "
                "layers (_no_split_modules is empty), so FSDP2 would gather the model at once; "
                "expected a decoder. Load it with wrap='ddp' or 'tp'."
            )
        for layer in reversed(layers):  # inner ones first
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
