"""A transformers model of a folder, built without its weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def build_without_weights(folder: str, dtype: torch.dtype | None) -> Any:
    """The model of a folder's config: parameters on the meta device, other buffers as they will be.

    It is what ``AutoModelForCausalLM.from_pretrained`` fills: in eval mode, tied, each parameter in
    the dtype that it will have, with the folder's generation config.

    Args:
        folder: a local one, with config.json.
        dtype: of the parameters; None: that of the config, else torch's default.

    Raises:
        NotImplementedError: the weights are quantised.
        OSError, ValueError: transformers cannot read the config, or it has code of its own.

    Cost: no memory for parameters.
    """
    import accelerate
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError(
            f"{folder}: config.json has a quantization_config, so the stored numbers are codes, "
            "not weights; expected the checkpoint that it was made from."
        )
    if dtype is not None:
        config.dtype = dtype
    factory: Any = transformers.AutoModelForCausalLM
    with accelerate.init_empty_weights(include_buffers=False):
        model = factory.from_config(
            config, dtype=config.dtype or torch.get_default_dtype(), trust_remote_code=False
        )
    model.config.name_or_path = folder
    model.tie_weights()
    _keep_in_float32(model, model.config.dtype)
    _read_generation_config(model, folder)
    return model.eval()


def decoder_layers(model: Any) -> list[nn.Module]:
    """The modules that transformers never splits over devices, outer ones first.

    Args:
        model: of transformers; FSDP2 may have given modules classes derived from theirs.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [m for m in model.modules() if names & {c.__name__ for c in type(m).__mro__}]


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Give parameters that transformers keeps in float32 that dtype."""
    plan_of = getattr(model, "_get_dtype_plan", None)
    plan = {} if plan_of is None else plan_of(dtype)
    if not plan:
        return
    loading = importlib.import_module("transformers.core_model_loading")
    pattern, by_group, *_ = loading.build_glob_alternation(list(plan))
    for name, parameter in model.named_parameters():
        match = pattern.search(name)
        if match is not None:
            parameter.data = parameter.data.to(plan[by_group[match.lastgroup]])


def put_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter or buffer in the place of the one of this full name."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


def names_by_tensor(tensors: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """The names of each tensor; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _read_generation_config(model: Any, folder: str) -> None:
    import transformers

    if model.can_generate():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                folder, local_files_only=True
            )
        except OSError:  # the folder has none: it is made from the config
            return


def tensors_of_checkpoints(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of a model: parameters and persistent buffers; tied ones each time.

    Without hooks of wrappers, unlike ``state_dict``.
    """
    saved = set(model.state_dict(keep_vars=True))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved:
            yield name, buffer
