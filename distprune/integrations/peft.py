"""LoRA on a pruned model, with PEFT: zeros stay zeros through training and through merging.

    model = AutoModelForCausalLM.from_pretrained("llama-pruned")
    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    hold_zeros(model)  # before or after DDP and fully_shard
    ...  # train
    merged = merge_and_unload(model)
    merged.save_pretrained("llama-recovered")  # the zeros of llama-pruned, exactly

PEFT alone trains ``W + scaling * B A``, which has no zeros; if the zeros are put back after
merging, the model is not the one that was trained. Here the delta is masked in training already,
so that the outputs before and after merging are equal but for rounding.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from distprune.base.amount import listed
from distprune.base.naming import Pair, named_modules, unwrap
from distprune.base.pruned_form import MASK, ORIG, is_dtensor, local_tensor
from distprune.masks.hook import find_hook
from distprune.ranks.collectives import over_mesh, resolved, whole, world
from distprune.wrappers.wrapper import is_managed

# Ways to begin that leave the base weight as it is.
_INITS = (True, False, "gaussian", "orthogonal", "eva")


def hold_zeros(model: nn.Module, *, group: ProcessGroup | None = None) -> tuple[str, ...]:
    """Make the LoRA layers of a pruned model leave the zeros of its weights zero. Collective.

    From now on the weight of such a layer is ``W + scaling * B A`` with the delta 0 wherever W is,
    in training, with several adapters, and after ``merge_adapter``, ``merge_and_unload`` and
    ``unmerge_adapter``. The zeros are those that W has, as ordinary values or by masks in force;
    an element that happens to be 0 is one of them. A layer without a zero stays as it
    is. Adapters added or loaded into these layers later are held too; call this again
    if one reaches other layers. Adapters are saved as PEFT saves any: the file does not know
    of the zeros, so call this after loading one, too.

    Args:
        model: of ``get_peft_model`` or ``PeftModel.from_pretrained``, with its weights loaded;
            plain, under DDP, or after ``fully_shard`` of whole blocks.
        group: the ranks that take part; every rank by default.

    Returns:
        The names of the layers that hold zeros, the same on every rank.

    Raises:
        ValueError: no layer with an adapter has zeros; an adapter is merged; ranks differ.
        NotImplementedError: zeros in a layer that cannot hold them: another kind of adapter or of
            layer than LoRA of nn.Linear and Conv1D, DoRA and other variants, an initialisation that
            changes the base (PiSSA, ...), a quantised base, a base that is trained without
            masks, modules_to_save, FSDP1, tensor parallelism. Names the layer. Nothing has
            changed then, on any rank.

    Cost: a read of the weights; an all-reduce of 8 bytes per layer. What each forward and backward
    costs more than unpruned LoRA: see [Note: cost of a held adapter].
    """
    pruned = _pruned_layers(model, group)
    if not pruned:
        raise ValueError(
            "no layer with an adapter has zeros in its base weight; expected a model that was "
            "pruned before get_peft_model. (Some values of init_lora_weights, such as 'pissa', "
            "change the base weights and fill their zeros.)"
        )
    configs = _unwrapped(model).peft_config.items()
    inits = {name: getattr(config, "init_lora_weights", True) for name, config in configs}
    obstacles = {name: _obstacle(layer, inits) for name, layer in pruned.items()}
    refused = [f"{name} {obstacle}" for name, obstacle in obstacles.items() if obstacle]
    if refused:
        raise NotImplementedError(
            f"{listed(refused, 3, '; ')}. Expected that only LoRA of nn.Linear and Conv1D changes "
            "weights with zeros. Leave such modules out of target_modules and modules_to_save."
        )
    for layer in pruned.values():
        held = next(iter(layer.lora_variant.values()), None) or HeldDelta()
        layer.lora_variant.update(dict.fromkeys(layer.lora_A, held))
        # Asked for each adapter that is added to the layer.
        layer.resolve_lora_variant = functools.partial(_resolve, layer, held)
    return tuple(pruned)


def merge_and_unload(
    model: nn.Module,
    *,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
    group: ProcessGroup | None = None,
) -> nn.Module:
    """Merge adapters into the pruned base, whose zeros stay, and return it without them.

    What ``PeftModel.merge_and_unload`` does, after a check that no zero would be filled. Works
    under FSDP2, too: each rank merges its shard. Masks in force stay in force. Collective.

    Args:
        model: as it was given to :func:`hold_zeros`.
        safe_merge: refuse an adapter with values that are not finite.
        adapter_names: those to merge; the active ones by default.
        group: the ranks that take part; every rank by default.

    Raises:
        ValueError: a layer has zeros and does not hold them; names it; nothing has changed.

    Cost: two reads of the weights; per layer, one matrix of the size of this rank's part of
    it, and under FSDP2 an all-gather of the factors A.
    """
    pruned = _pruned_layers(model, group)
    unheld = [name for name, layer in pruned.items() if not _holds_zeros(layer)]
    if unheld:
        raise ValueError(
            f"{listed(unheld, 3)}: the base weight has zeros, which merging would fill; "
            "expected layers that hold them. Call hold_zeros(model) after get_peft_model or "
            "PeftModel.from_pretrained, before training: an adapter that was trained without it is "
            "another model."
        )
    tuned: Any = _unwrapped(model)
    for module in tuned.modules():
        # A copy that FSDP2 has gathered is not the weight. Only its modules have this method.
        if hasattr(module, "set_reshard_after_forward"):
            module.reshard()
    return tuned.merge_and_unload(safe_merge=safe_merge, adapter_names=adapter_names)


def save_adapter(model: nn.Module, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Save the adapters of a model that may be sharded, as PEFT does. Collective; rank 0 writes.

    Args:
        model: of PEFT, plain, under DDP or FSDP2.
        path: the folder to write; ``PeftModel.from_pretrained(base, path)`` loads it.
        kwargs: for ``PeftModel.save_pretrained`` (``selected_adapters``, ...).

    Raises:
        TypeError: the model is not one of PEFT.
        Exception: what rank 0 raises when it writes; on every rank.

    Cost: the adapters are gathered on every rank. The base weights are not.
    """
    communicator = world()
    tuned = communicator.run(lambda: _unwrapped(model))

    def gather_and_write() -> None:
        state = {
            name: whole(value).cpu() if is_dtensor(value) else value
            for name, value in tuned.state_dict().items()
            if "lora_" in name or "modules_to_save." in name
        }
        if communicator.index == 0:
            tuned.save_pretrained(path, state_dict=state, **kwargs)

    communicator.run(gather_and_write)


def _pruned_layers(model: nn.Module, group: ProcessGroup | None) -> dict[str, Any]:
    """By name, the layers of PEFT whose base weights have zeros, on any rank."""

    def find() -> dict[str, tuple[nn.Module, list[Pair]]]:
        found: dict[str, tuple[nn.Module, list[Pair]]] = {}
        for path, module in named_modules(_unwrapped(model)):
            if isinstance(module, BaseTunerLayer):
                base = module.get_base_layer()
                found[path] = module, _matrices(base)
                if not found[path][1] and any(True for _ in base.parameters()):
                    raise NotImplementedError(
                        f"{path}: the base layer is a {type(base).__name__} without a matrix of "
                        "floating-point numbers, as quantised layers and those of FSDP1 are; "
                        "expected an unquantised model, plain or under FSDP2."
                    )
            elif isinstance(module, AuxiliaryTrainingWrapper):
                parts = getattr(module, "modules_to_save", {}).values()
                found[path] = module, [place for part in parts for place in _matrices(part)]
        return found

    def count() -> Tensor:
        zeros = [_count_zeros(weights) for _, weights in layers.values()]
        return torch.tensor(zeros, dtype=torch.int64)

    ranks = world(group)
    with ranks.exclusively():
        layers = ranks.run(find, lambda found: [(name, "") for name in found])
        counts = ranks.reduce(len(layers), count).tolist()
    named = zip(layers.items(), counts, strict=True)
    return {name: layer for (name, (layer, _)), zeros in named if zeros}


def _unwrapped(model: nn.Module) -> Any:
    tuned = unwrap(model)
    if not isinstance(tuned, PeftModel):
        raise TypeError(
            f"model is a {type(tuned).__name__}; expected what peft.get_peft_model or "
            "PeftModel.from_pretrained returned, wrapped or not."
        )
    return tuned


def _matrices(module: nn.Module) -> list[Pair]:
    return [
        (owner, key)
        for owner in module.modules()
        for key, parameter in owner._parameters.items()
        if parameter is not None and parameter.ndim > 1 and parameter.is_floating_point()
    ]


def _obstacle(layer: Any, inits: dict[str, Any]) -> str | None:
    """Why the zeros of a layer cannot be held; None if they can."""
    # FSDP2 puts a class of its own in front.
    kind = next(cls for cls in type(layer).__mro__ if not cls.__module__.startswith("torch."))
    if kind is not LoraLinear:
        return f"is a {kind.__module__}.{kind.__qualname__}"
    base = layer.get_base_layer()
    others = {
        name: type(each).__name__
        for name, each in layer.lora_variant.items()
        if not isinstance(each, HeldDelta)
    }
    changing = {name: inits[name] for name in layer.lora_A if inits[name] not in _INITS}
    if others or changing:
        return f"has adapters of other forms: {others or changing}"
    if layer.merged and not _holds_zeros(layer):
        return "has merged adapters (call unmerge_adapter first)"
    if stored_weight(base).requires_grad and find_hook(base, "weight") is None:
        return "has a base weight that is trained, without a mask (masks_from_zeros makes one)"
    if any(layer.lora_bias.values()) and find_hook(base, "bias") is not None:
        return "has lora_bias, and a bias that is pruned"
    is_parallel = is_dtensor(stored_weight(base)) and not is_managed(base, "weight")
    if is_parallel or getattr(base, "_hf_tp_plan", None):
        return "is tensor-parallel"
    return None


def _holds_zeros(layer: nn.Module) -> bool:
    """Whether every adapter of a LoRA layer leaves the zeros of the base weight zero."""
    variants = getattr(layer, "lora_variant", {})
    held = {name for name, each in variants.items() if isinstance(each, HeldDelta)}
    return bool(held) and set(getattr(layer, "lora_A", ())) <= held


def _count_zeros(weights: Iterable[Pair]) -> int:
    """Zeros of this rank's parts of some weights; 0 if they are the row of a padding token."""
    total = 0
    for owner, key in weights:
        zeros = int(zeros_of(owner, key.removesuffix(ORIG)).sum())
        if not (isinstance(owner, nn.Embedding) and zeros <= owner.embedding_dim):
            total += zeros
    return total


def _resolve(layer: Any, held: HeldDelta, **kwargs: Any) -> HeldDelta:
    other = type(layer).resolve_lora_variant(layer, **kwargs)
    init = getattr(kwargs.get("config"), "init_lora_weights", True)
    if other is not None or init not in _INITS:
        raise NotImplementedError(
            f"an adapter of the form {type(other).__name__ if other is not None else init!r} is "
            "added to a layer that holds its zeros; expected plain LoRA."
        )
    return held


def stored_weight(base: nn.Module, name: str = "weight") -> Tensor:
    """The parameter that a base layer trains or freezes: ``weight_orig`` if it is pruned."""
    parameters = base._parameters
    stored = parameters.get(name + ORIG, parameters.get(name))
    assert stored is not None
    return stored


def zeros_of(base: nn.Module, name: str = "weight") -> Tensor:
    """Which elements of this rank's part of a base weight are zero, by value or by a mask."""
    zeros = local_tensor(stored_weight(base, name).detach()) == 0
    mask = base._buffers.get(name + MASK)
    if mask is not None:
        zeros |= local_tensor(mask) == 0
    return zeros


class HeldDelta:
    """What the adapters of one layer do where the base weight has zeros: nothing.

    The layer's weight is ``W + sum(scaling * B A)``, with each summand 0 wherever W is, in training
    and after merging. The zeros are those of W at each forward, so no mask is stored; W is
    frozen. They are kept, as a mask, while adapters are merged, because a sum may be 0.

    [Note: cost of a held adapter] Instead of ``B (A x)``, of rank r, the dense ``B A`` is computed
    and masked in each forward, and once more in backward (by torch's checkpoint: autograd keeps
    neither). Per layer and adapter: memory for two matrices of the size of the weight for as
    long as the layer computes, in the dtype of the adapter, and for as many Booleans. The tokens
    are multiplied by a matrix of that size 5 times in a forward and its backward, where LoRA does
    it twice and full fine-tuning three times.
    """

    def __init__(self) -> None:
        self._zeros: Tensor | None = None

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        """Called by PEFT for a new adapter: it has no further parameters."""

    def supports_lora_conversion(self) -> bool:
        """A masked ``B A`` has no low rank."""
        return False

    def forward(
        self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """The output of the base layer with that of an adapter added."""
        a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        weight = module.get_base_layer().weight
        scaling = module.scaling[active_adapter]
        added: Tensor = checkpoint(
            _masked_linear,
            module.lora_dropout[active_adapter](x),
            weight,
            a.weight,
            b.weight,
            scaling,
            module.fan_in_fan_out,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        if b.bias is not None:
            added = added + b.bias * scaling
        return result + added

    def merge_safe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """Add an adapter to the base weight, unless values would be lost to inf or NaN."""
        return self._change(module, active_adapter, 1, is_checked=True)

    def merge_unsafe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        """Add an adapter to the base weight."""
        self._change(module, active_adapter, 1)

    def unmerge(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """Subtract an adapter from the base weight, as far as rounding lets."""
        return self._change(module, active_adapter, -1)

    def _change(self, layer: Any, adapter: str, sign: int, is_checked: bool = False) -> Tensor:
        base = layer.get_base_layer()
        stored = stored_weight(base)
        if is_managed(base, "weight") and not is_dtensor(stored):
            raise RuntimeError(
                "the base weight of a LoRA layer is a copy that FSDP gathered: what is merged into "
                "it would be lost. Call reshard() on the modules of FSDP2 before, or "
                "distprune.integrations.peft.merge_and_unload, which does it."
            )
        with torch.no_grad():
            if self._zeros is None:
                self._zeros = zeros_of(base)
            delta = _delta(layer, adapter, stored).masked_fill_(self._zeros, 0)
            local = local_tensor(stored.detach())
            if is_checked:
                is_bad = (local + delta).isfinite().logical_not().any().to(torch.int64).view(1)
                if is_dtensor(stored):
                    is_bad = over_mesh(stored.device_mesh).max(is_bad)
                if is_bad:
                    raise ValueError(
                        f"adapter {adapter!r} has, or makes, values that are not finite; expected "
                        "finite ones (safe_merge=True). Nothing was merged into this layer."
                    )
            local.add_(delta, alpha=sign)
            if sign < 0 and not layer.merged_adapters:
                self._zeros = None
            present = find_hook(base, "weight")
            if present is not None:
                present(base, ())  # computes the product anew
        # What PEFT assigns to ``weight.data``: it has it already.
        return base.weight.data


def _masked_linear(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, is_transposed: bool
) -> Tensor:
    delta = (b * scaling) @ a
    zeros = weight == 0
    # Not a product: inf * 0 would be NaN.
    return F.linear(x, delta.masked_fill_(zeros.T if is_transposed else zeros, 0))


def _delta(layer: Any, adapter: str, stored: Tensor) -> Tensor:
    """``scaling * B A``, laid out like this rank's part of the base weight."""
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    if is_dtensor(stored):
        out_dim = 1 if layer.fan_in_fan_out else 0
        a, b = _part(a, 1, stored, 1 - out_dim), _part(b, 0, stored, out_dim)
    if a.dtype in (torch.float16, torch.bfloat16):
        a, b = a.float(), b.float()
    delta: Tensor = (b * layer.scaling[adapter]) @ a
    return delta.T if layer.fan_in_fan_out else delta


def _part(factor: Tensor, dim: int, stored: Any, stored_dim: int) -> Tensor:
    """What of a factor this rank's part of the base weight needs, along one of their dimensions."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not is_dtensor(factor):  # one that FSDP was told to ignore
        replicas = [Replicate()] * stored.device_mesh.ndim
        factor = DTensor.from_local(factor, stored.device_mesh, replicas, run_check=False)
    is_cut = (placement.is_shard(stored_dim) for placement in stored.placements)
    return resolved(factor, [Shard(dim) if cut else Replicate() for cut in is_cut])
