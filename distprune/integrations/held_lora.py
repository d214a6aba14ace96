"""The adapter of one LoRA layer whose base weight has zeros: ``W + scaling * B A``, but at zeros.

PEFT lets an object stand in for what an adapter does in a layer (``LoraLayer.lora_variant``, by
which it implements DoRA): :class:`HeldDelta` is such an object. This file does not import PEFT.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distprune._common.collectives import resolved
from distprune._common.process_groups import over_mesh
from distprune._common.pruned_form import is_dtensor, local_tensor, mask_key, orig_key
from distprune.masks.hook import find_hook
from distprune.torch_private.wrapper import is_flattened, is_managed


def stored_weight(base: nn.Module) -> Tensor:
    """The parameter that a base layer trains or freezes: ``weight_orig`` if it is pruned."""
    parameters = base._parameters
    stored = parameters.get(orig_key("weight"), parameters.get("weight"))
    assert stored is not None
    return stored


def zeros_of(base: nn.Module) -> Tensor:
    """Which elements of this rank's part of a base weight are zero, by value or by a mask."""
    zeros = local_tensor(stored_weight(base).detach()) == 0
    mask = base._buffers.get(mask_key("weight"))
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

    holds_zeros = True

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
        if any(is_dtensor(tensor) for tensor in (weight, a.weight, b.weight)):
            raise RuntimeError(
                "the weights of a LoRA layer are sharded in its forward; expected whole ones. "
                "Under FSDP2 apply fully_shard to whole blocks, not to single layers of PEFT; "
                "tensor-parallel layers are not supported by hold_zeros."
            )
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
        if is_flattened(base, "weight"):
            raise NotImplementedError("merging under FSDP1; expected FSDP2 (fully_shard).")
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
                _check_finite(stored, local, delta, adapter)
            local.add_(delta, alpha=sign)
            if sign < 0 and not layer.merged_adapters:
                self._zeros = None
            present = find_hook(base, "weight")
            if present is not None:
                present[1](base, ())  # computes the product anew
        # What PEFT assigns to ``weight.data``: it has it already.
        changed: Tensor = base.weight.data
        return changed


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
        a, b = _parts(a, b, stored, out_dim=1 if layer.fan_in_fan_out else 0)
    if a.dtype in (torch.float16, torch.bfloat16):
        a, b = a.float(), b.float()
    delta: Tensor = (b * layer.scaling[adapter]) @ a
    return delta.T if layer.fan_in_fan_out else delta


def _parts(a: Tensor, b: Tensor, stored: Any, out_dim: int) -> tuple[Tensor, Tensor]:
    """The rows of B and columns of A that this rank's part of the base weight needs."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    places_a, places_b = [], []
    for placement in stored.placements:
        is_out, is_sharded = placement.is_shard(out_dim), placement.is_shard()
        places_a.append(Shard(1) if is_sharded and not is_out else Replicate())
        places_b.append(Shard(0) if is_out else Replicate())
    parts = []
    for factor, places in ((a, places_a), (b, places_b)):
        if not is_dtensor(factor):  # one that FSDP was told to ignore
            replicated = [Replicate()] * stored.device_mesh.ndim
            factor = DTensor.from_local(factor, stored.device_mesh, replicated, run_check=False)
        parts.append(resolved(factor, places))
    return parts[0], parts[1]


def _check_finite(stored: Tensor, local: Tensor, delta: Tensor, adapter: str) -> None:
    def check() -> None:
        if not torch.isfinite(local + delta).all():
            raise ValueError(
                f"adapter {adapter!r} has, or makes, values that are not finite; expected finite "
                "ones (safe_merge=True). Nothing was merged into this layer."
            )

    if is_dtensor(stored):
        over_mesh(stored.device_mesh).run(check)
    else:
        check()
