"""Spread a model that has no weights yet over the ranks.

Transformers has a tensor-parallel plan for each model: names of styles by names of modules, ``*``
for a number. Here torch's ``parallelize_module`` carries it out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distprune._transformers.building import decoder_layers, names_by_tensor, put_tensor
from distprune.ranks.process_groups import is_distributed

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

# What is known of transformers' styles: the dimension of the weight that is split, and whether all
# ranks must get as much. (Where they need not, torch gathers or sums the outputs itself.)
_SPLITS = {
    "colwise": (0, True), "colwise_gather_output": (0, False), "colwise_rep": (0, False),
    "rowwise": (1, True), "rowwise_split_input": (1, True), "rowwise_rep": (1, True),
    "embedding_rowwise": (0, False), "replicated_with_grad_allreduce": (None, False),
}  # fmt: skip


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """Split a model on the meta device over a mesh of one axis, by transformers' plan for it.

    Raises:
        NotImplementedError: transformers has no plan for the model, the plan has a style that is
            not known here, or a dimension or the attention heads cannot be split evenly; names it.

    Cost: no communication.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    styles = _styles_by_module(model)
    _check_even(model, styles, mesh.size())
    _join_tied(model, styles)
    plan = {name: _torch_style(style) for name, style in styles.items()}
    tied = names_by_tensor(model.named_parameters(remove_duplicate=False))
    # The weights are read from files by each rank, so none is sent: src_data_rank=None.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for first, *others in tied:
        for name in others:
            put_tensor(model, name, model.get_parameter(first))


def _torch_style(name: str) -> ParallelStyle:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    if name == "colwise":
        return ColwiseParallel()
    if name in ("colwise_gather_output", "colwise_rep"):
        return ColwiseParallel(output_layouts=Replicate())
    if name == "rowwise":
        return RowwiseParallel()
    if name in ("rowwise_split_input", "rowwise_rep", "embedding_rowwise"):
        return RowwiseParallel(input_layouts=Replicate())
    # A norm of the heads of this rank, of shape [batch, heads or tokens, ..., head_dim]. Which of
    # the dimensions is called sharded does not matter: the weight's gradients are summed.
    assert name == "replicated_with_grad_allreduce"
    return SequenceParallel(sequence_dim=1, use_local_output=True)


def _styles_by_module(model: Any) -> dict[str, str]:
    """The style of every module that has one, by its full name."""
    cls = type(model).__name__
    way_out = "Load it with wrap='fsdp2'."
    plan: dict[str, str] = dict(model.tp_plan or {})
    if not plan:
        raise NotImplementedError(
            f"transformers has no tensor-parallel plan for {cls}; expected a model with a tp_plan. "
            f"{way_out}"
        )
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()
    ]
    # A plan may name parts that this config leaves out, such as a mixture's experts.
    names = [name for name, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]
    styles: dict[str, str] = {}
    for name in names:
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                if style not in _SPLITS:
                    raise NotImplementedError(
                        f"{name}: the style {style!r} in transformers' tensor-parallel plan for "
                        f"{cls} is not known here; expected {', '.join(_SPLITS)}. {way_out}"
                    )
                styles[name] = style
    return styles


def _check_even(model: Any, styles: dict[str, str], num_ranks: int) -> None:
    config = model.config.get_text_config()
    for count in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, count, None)
        if isinstance(heads, int) and heads % num_ranks:
            raise NotImplementedError(
                f"{count}={heads} cannot be split evenly over {num_ranks} tensor-parallel ranks; "
                "expected a number of ranks that divides it. Use fewer ranks along that axis, or "
                "wrap='fsdp2'."
            )
    for name, style in styles.items():
        weight = getattr(model.get_submodule(name), "weight", None)
        dim, is_even = _SPLITS[style]
        if weight is not None and is_even and weight.shape[dim] % num_ranks:
            raise NotImplementedError(
                f"{name}.weight: dimension {dim} of shape {tuple(weight.shape)} cannot be split "
                f"evenly over {num_ranks} tensor-parallel ranks; expected a number of ranks that "
                "divides it. Use fewer ranks along that axis, or wrap='fsdp2'."
            )


def _join_tied(model: nn.Module, styles: dict[str, str]) -> None:
    """Give tied weights one layout: the vocabulary is split in both modules, or in none."""
    by_rows = {style for style, (dim, _) in _SPLITS.items() if dim == 0}
    for names in names_by_tensor(model.named_parameters(remove_duplicate=False)):
        modules = [name.rpartition(".")[0] for name in names]
        if len(names) == 1 or not any(module in styles for module in modules):
            continue
        for module in modules:
            if module not in styles and isinstance(model.get_submodule(module), nn.Embedding):
                styles[module] = "embedding_rowwise"
        if not all(styles.get(module) in by_rows for module in modules):
            for module in modules:
                styles.pop(module, None)


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
        NotImplementedError: see :func:`distprune.language_models.wrapping.parallelize`; or
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
