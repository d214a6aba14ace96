"""The public names of the library; ``distprune/__init__.py`` imports this file when one is used.

Those that begin with an underscore are private in torch.nn.utils.prune, but programs call them.
"""

# ruff: noqa: F401

from distprune import budgets as budgets
from distprune import checkpoint as checkpoint
from distprune import criteria as criteria
from distprune import dynamic as dynamic
from distprune import schedule as schedule
from distprune import statistics as statistics
from distprune.api.chosen_masks import get_masks as get_masks
from distprune.api.chosen_masks import hold_zeros as hold_zeros
from distprune.api.chosen_masks import load_masks as load_masks
from distprune.api.chosen_masks import masks_aside as masks_aside
from distprune.api.chosen_masks import masks_from_zeros as masks_from_zeros
from distprune.api.chosen_masks import save_masks as save_masks
from distprune.api.chosen_masks import set_masks as set_masks
from distprune.api.global_mask import GlobalMask as GlobalMask
from distprune.api.global_mask import global_mask as global_mask
from distprune.api.global_structured import ChannelPart as ChannelPart
from distprune.api.global_structured import global_structured as global_structured
from distprune.api.global_structured import shrink_channels as shrink_channels
from distprune.api.global_unstructured import global_unstructured as global_unstructured
from distprune.api.local import custom_from_mask as custom_from_mask
from distprune.api.local import identity as identity
from distprune.api.local import is_pruned as is_pruned
from distprune.api.local import l1_unstructured as l1_unstructured
from distprune.api.local import ln_structured as ln_structured
from distprune.api.local import random_structured as random_structured
from distprune.api.local import random_unstructured as random_unstructured
from distprune.api.local import remove as remove
from distprune.api.select import select as select
from distprune.base.amount import resolve_count as _compute_nparams_toprune
from distprune.base.amount import validate_amount as _validate_pruning_amount_init
from distprune.base.amount import validate_count as _validate_pruning_amount
from distprune.base.naming import NamedParameter as NamedParameter
from distprune.call.report import ChannelGroupReport as ChannelGroupReport
from distprune.call.report import MaskLoadingReport as MaskLoadingReport
from distprune.call.report import ParameterReport as ParameterReport
from distprune.call.report import PruningReport as PruningReport
from distprune.call.report import StructuredReport as StructuredReport
from distprune.dynamic import dense_gradients as dense_gradients
from distprune.methods.base import BasePruningMethod as BasePruningMethod
from distprune.methods.base import CustomFromMask as CustomFromMask
from distprune.methods.base import Identity as Identity
from distprune.methods.base import L1Unstructured as L1Unstructured
from distprune.methods.base import LowestScore as LowestScore
from distprune.methods.base import PruningContainer as PruningContainer
from distprune.methods.base import RandomUnstructured as RandomUnstructured
from distprune.methods.channels import LnStructured as LnStructured
from distprune.methods.channels import RandomStructured as RandomStructured
from distprune.methods.channels import compute_norm as _compute_norm
from distprune.methods.channels import validate_channels as _validate_structured_pruning
from distprune.methods.channels import validate_dim as _validate_pruning_dim
from distprune.reconstruction import ReconstructedParameter as ReconstructedParameter
from distprune.reconstruction import ReconstructionReport as ReconstructionReport
from distprune.reconstruction import reconstruct as reconstruct
from distprune.shards.factored import FactoredScores as FactoredScores
from distprune.verification import VerificationError as VerificationError
from distprune.verification import VerificationReport as VerificationReport
from distprune.verification import VerifiedParameter as VerifiedParameter
from distprune.verification import verify as verify
from distprune.wrappers.held import keep_pruned_values as keep_pruned_values
