"""Tensor parallelism of a transformers model by its own plan.

Transformers has a plan for each model: names of styles by names of modules, ``*`` for a number.
Here torch's ``parallelize_module`` carries it out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

# Splits of which a rank may get less than another: torch gathers or sums their outputs itself.
_MAY_BE_UNEVEN = {"colwise_gather_output", "colwise_rep", "embedding_rowwise"}


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
    tied = _tied_names(model)
    # The weights are read from files by each rank, so none is sent: src_data_rank=None.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for first, *others in tied:
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, model.get_parameter(first))


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


_KNOWN = (
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input",
    "rowwise_rep", "embedding_rowwise", "replicated_with_grad_allreduce",
)  # fmt: skip


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
                if style not in _KNOWN:
                    raise NotImplementedError(
                        f"{name}: the style {style!r} in transformers' tensor-parallel plan for "
                        f"{cls} is not known here; expected {', '.join(_KNOWN)}. {way_out}"
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
        if weight is None or style in _MAY_BE_UNEVEN or style.startswith("replicated"):
            continue
        dim = 0 if style.startswith("colwise") else 1
        if weight.shape[dim] % num_ranks:
            raise NotImplementedError(
                f"{name}.weight: dimension {dim} of shape {tuple(weight.shape)} cannot be split "
                f"evenly over {num_ranks} tensor-parallel ranks; expected a number of ranks that "
                "divides it. Use fewer ranks along that axis, or wrap='fsdp2'."
            )


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one object."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _join_tied(model: nn.Module, styles: dict[str, str]) -> None:
    """Give tied weights one layout: the vocabulary is split in both modules, or in none."""
    by_rows = {"colwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise"}
    for names in _tied_names(model):
        modules = [name.rpartition(".")[0] for name in names]
        if not any(module in styles for module in modules):
            continue
        for module in modules:
            if module not in styles and isinstance(model.get_submodule(module), nn.Embedding):
                styles[module] = "embedding_rowwise"
        if not all(styles.get(module) in by_rows for module in modules):
            for module in modules:
                styles.pop(module, None)
