"""Exact pruning on any sharding: a drop-in for torch.nn.utils.prune that ranks over all ranks.

import distprune as prune

prune.global_unstructured(
    prune.select(model),
    pruning_method=prune.L1Unstructured,
    amount=0.5,
)
"""

from __future__ import annotations

import importlib

from distprune._version import __version__ as __version__

# Type checkers take this name for true. The module ``typing`` is not imported for it, because this
# file runs before ``python -m distprune`` takes the current folder off the path.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from distprune._public import *
    from distprune._public import _compute_norm as _compute_norm
    from distprune._public import _compute_nparams_toprune as _compute_nparams_toprune
    from distprune._public import _validate_pruning_amount as _validate_pruning_amount
    from distprune._public import _validate_pruning_amount_init as _validate_pruning_amount_init
    from distprune._public import _validate_pruning_dim as _validate_pruning_dim
    from distprune._public import _validate_structured_pruning as _validate_structured_pruning

# Where each public name is defined, by module; modules map to themselves.
_HOMES = {
    "BasePruningMethod": "methods.base",
    "ChannelGroup": "methods.channels",
    "ChannelGroupReport": "call.report",
    "ChannelPart": "methods.channels",
    "CustomFromMask": "methods.builtin",
    "FactoredScores": "shards.factored",
    "GlobalMask": "api.global_mask",
    "Identity": "methods.builtin",
    "L1Unstructured": "methods.builtin",
    "LnStructured": "methods.builtin",
    "LowestScore": "methods.builtin",
    "MaskLoadingReport": "call.report",
    "MaskUpdate": "call.report",
    "MaskUpdateReport": "call.report",
    "NamedParameter": "base.naming",
    "ParameterReport": "call.report",
    "PruningContainer": "methods.base",
    "PruningReport": "call.report",
    "RandomStructured": "methods.builtin",
    "RandomUnstructured": "methods.builtin",
    "ReconstructedParameter": "reconstruction.reconstructing",
    "ReconstructionReport": "reconstruction.reconstructing",
    "StructuredReport": "call.report",
    "VerificationError": "verification.report",
    "VerificationReport": "verification.report",
    "VerifiedParameter": "verification.report",
    "budgets": "budgets",
    "checkpoint": "checkpoint",
    "criteria": "criteria",
    "custom_from_mask": "api.local",
    "dense_gradients": "dynamic",
    "dynamic": "dynamic",
    "get_masks": "api.chosen_masks",
    "global_mask": "api.global_mask",
    "global_structured": "api.global_structured",
    "global_unstructured": "api.global_unstructured",
    "identity": "api.local",
    "is_pruned": "api.local",
    "l1_unstructured": "api.local",
    "ln_structured": "api.local",
    "load_masks": "api.mask_files",
    "masks_aside": "api.wrap_later",
    "masks_from_zeros": "api.chosen_masks",
    "random_structured": "api.local",
    "random_unstructured": "api.local",
    "reconstruct": "reconstruction.reconstructing",
    "remove": "api.local",
    "save_masks": "api.mask_files",
    "schedule": "schedule",
    "select": "api.select",
    "set_masks": "api.chosen_masks",
    "shard_masks": "api.wrap_later",
    "statistics": "statistics",
    "verify": "verification.verifying",
    # Private in torch.nn.utils.prune, but programs call them: module:attribute.
    "_compute_norm": "methods.builtin:compute_norm",
    "_compute_nparams_toprune": "base.amount:resolve_count",
    "_validate_pruning_amount": "base.amount:validate_count",
    "_validate_pruning_amount_init": "base.amount:validate_amount",
    "_validate_pruning_dim": "methods.builtin:validate_dim",
    "_validate_structured_pruning": "methods.builtin:validate_channels",
}

__all__ = [name for name in _HOMES if not name.startswith("_")]


if not TYPE_CHECKING:  # a checker would take any name for one of the library

    def __getattr__(name: str) -> object:
        """Import a name of the library, and what it needs, when it is first used.

        The command line is a part of this package, and its ``--help`` need not wait seconds for
        torch. A first pruning needs half of the library.
        """
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home, _, attribute = _HOMES[name].partition(":")
        value = importlib.import_module(f"{__name__}.{home}")
        if home != name:
            value = getattr(value, attribute or name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
