"""Exact pruning on any sharding: a drop-in for torch.nn.utils.prune that ranks over all ranks.

import distprune as prune

prune.global_unstructured(
    prune.select(model, exclude="lm_head"),
    pruning_method=prune.L1Unstructured,
    amount=0.5,
)
"""

from distprune import checkpoint, schedule
from distprune.amount import resolve_count as _compute_nparams_toprune  # noqa: F401
from distprune.amount import validate_amount as _validate_pruning_amount_init  # noqa: F401
from distprune.amount import validate_count as _validate_pruning_amount  # noqa: F401
from distprune.global_pruning import global_unstructured
from distprune.local_pruning import (
    custom_from_mask,
    identity,
    is_pruned,
    l1_unstructured,
    ln_structured,
    random_structured,
    random_unstructured,
    remove,
)
from distprune.methods import (
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    RandomStructured,
    RandomUnstructured,
)
from distprune.methods import compute_norm as _compute_norm  # noqa: F401
from distprune.naming import NamedParameter
from distprune.pruning_method import BasePruningMethod, PruningContainer
from distprune.report import ParameterReport, PruningReport
from distprune.selecting import select
from distprune.wrapping import masks_aside, shard_masks

__version__ = "0.1.0"

__all__ = [
    "BasePruningMethod",
    "CustomFromMask",
    "Identity",
    "L1Unstructured",
    "LnStructured",
    "NamedParameter",
    "ParameterReport",
    "PruningContainer",
    "PruningReport",
    "RandomStructured",
    "RandomUnstructured",
    "checkpoint",
    "custom_from_mask",
    "global_unstructured",
    "identity",
    "is_pruned",
    "l1_unstructured",
    "ln_structured",
    "masks_aside",
    "random_structured",
    "random_unstructured",
    "remove",
    "schedule",
    "select",
    "shard_masks",
]
