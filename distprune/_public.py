"""Every public name of the library, in one place: what ``import distprune`` gives on first use."""

# ruff: noqa: F401

from distprune import checkpoint, schedule
from distprune._common.amount import resolve_count as _compute_nparams_toprune
from distprune._common.amount import validate_amount as _validate_pruning_amount_init
from distprune._common.amount import validate_count as _validate_pruning_amount
from distprune._common.naming import NamedParameter
from distprune.api.global_unstructured import global_unstructured
from distprune.api.local import (
    custom_from_mask,
    identity,
    is_pruned,
    l1_unstructured,
    ln_structured,
    random_structured,
    random_unstructured,
    remove,
)
from distprune.api.mask_files import save_masks
from distprune.api.mask_loading import load_masks
from distprune.api.select import select
from distprune.api.wrap_later import masks_aside, shard_masks
from distprune.api.zeros import masks_from_zeros
from distprune.call.report import MaskLoadingReport, ParameterReport, PruningReport
from distprune.methods.base import BasePruningMethod, PruningContainer
from distprune.methods.builtin import (
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    RandomStructured,
    RandomUnstructured,
)
from distprune.methods.builtin import compute_norm as _compute_norm
from distprune.verification.report import (
    VerificationError,
    VerificationReport,
    VerifiedParameter,
)
from distprune.verification.verifying import verify
