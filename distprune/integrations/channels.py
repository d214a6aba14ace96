"""The channels of transformers' decoders: neurons of their MLPs, and their heads.

groups = decoder_channels(model)
report = distprune.global_structured(groups, amount=0.2, normalize="rms")
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from distprune.api.global_structured import ChannelPart
from distprune.base.naming import NamedParameter, full_name, named_modules, unwrap

# config.model_type of the families whose modules have these names and this layout.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def decoder_channels(
    model: nn.Module, *, heads: bool = True, neurons: bool = True
) -> dict[str, list[ChannelPart]]:
    """The channels of a Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2 or Gemma 3 (text) model.

    A neuron of an MLP is a row of ``gate_proj`` and of ``up_proj``, and a column of ``down_proj``.
    A head is a key-value head with all query heads that share it: its rows of ``k_proj`` and
    ``v_proj``, those of its query heads of ``q_proj``, and their columns of ``o_proj``. Biases of
    rows go with them, and do not count for the norm. Biases of ``down_proj`` and ``o_proj`` belong
    to no channel, and neither do the norms of Qwen3 and Gemma 3, which all heads share.

    Args:
        model: plain, or wrapped in anything that this library supports; whole or a part, with the
            model's ``config``.
        heads: one group per attention, "model.layers.0.self_attn", of its key-value heads.
        neurons: one group per MLP, "model.layers.0.mlp".

    Returns:
        Groups by name, in the order of the modules, for :func:`distprune.global_structured`.

    Raises:
        NotImplementedError: another family (mixtures of experts among them), or a projection that
            is no ``nn.Linear`` (adapters, quantised layers).
        ValueError: neither heads nor neurons; a model without any.

    Cost: one walk over the modules; no communication.
    """
    if not heads and not neurons:
        raise ValueError("heads=False and neurons=False; expected one of them at least.")
    config = getattr(unwrap(model), "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise NotImplementedError(
            f"the model is of the family {family!r}; expected one of {', '.join(FAMILIES)}. Make "
            "the groups of other models yourself."
        )
    num_heads: int = config.num_attention_heads  # type: ignore[union-attr]
    num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim: int = getattr(config, "head_dim", None) or (
        config.hidden_size // num_heads  # type: ignore[union-attr]
    )
    query_size = num_heads // num_kv_heads * head_dim
    groups: dict[str, list[ChannelPart]] = {}
    for path, module in named_modules(model):
        children = {name: unwrap(child) for name, child in module.named_children()}
        if neurons and children.keys() >= set(_MLP):
            sizes = dict.fromkeys(_MLP, 1)
        elif heads and children.keys() >= set(_ATTENTION):
            sizes = dict(zip(_ATTENTION, (query_size, head_dim, head_dim, query_size), strict=True))
        else:
            continue
        groups[path] = [
            part
            for name, size in sizes.items()
            for part in _parts(path, name, children[name], size)
        ]
    if not groups:
        raise ValueError(
            f"{type(unwrap(model)).__name__} has no modules with {', '.join(_MLP)} or "
            f"{', '.join(_ATTENTION)}; expected the whole model or its layers."
        )
    return groups


def _parts(path: str, name: str, layer: nn.Module, size: int) -> Iterator[ChannelPart]:
    """The weight of a layer, and its bias if its channels are outputs."""
    fqn, is_output = full_name(path, name), name not in ("down_proj", "o_proj")
    if not isinstance(layer, nn.Linear):
        raise NotImplementedError(
            f"{fqn} is a {type(layer).__name__}; expected an nn.Linear. Make the groups "
            "yourself, or merge adapters into the weights first."
        )
    weight = NamedParameter(layer, "weight", full_name(fqn, "weight"))
    yield ChannelPart(weight, 0 if is_output else 1, size)
    if is_output and getattr(layer, "bias", None) is not None:
        bias = NamedParameter(layer, "bias", full_name(fqn, "bias"))
        yield ChannelPart(bias, 0, size, is_ranked=False)
