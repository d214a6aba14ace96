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

__all__ = [
    "BasePruningMethod",
    "ChannelGroup",
    "ChannelGroupReport",
    "ChannelPart",
    "CustomFromMask",
    "FactoredScores",
    "GlobalMask",
    "Identity",
    "L1Unstructured",
    "LnStructured",
    "LowestScore",
    "MaskLoadingReport",
    "MaskUpdate",
    "MaskUpdateReport",
    "NamedParameter",
    "ParameterReport",
    "PruningContainer",
    "PruningReport",
    "RandomStructured",
    "RandomUnstructured",
    "ReconstructedParameter",
    "ReconstructionReport",
    "StructuredReport",
    "VerificationError",
    "VerificationReport",
    "VerifiedParameter",
    "budgets",
    "checkpoint",
    "criteria",
    "custom_from_mask",
    "dense_gradients",
    "dynamic",
    "get_masks",
    "global_mask",
    "global_structured",
    "global_unstructured",
    "identity",
    "is_pruned",
    "l1_unstructured",
    "ln_structured",
    "load_masks",
    "masks_aside",
    "masks_from_zeros",
    "random_structured",
    "random_unstructured",
    "reconstruct",
    "remove",
    "save_masks",
    "schedule",
    "select",
    "set_masks",
    "shard_masks",
    "statistics",
    "verify",
]


_OF_TORCH = (  # private in torch.nn.utils.prune, but programs call them
    "_compute_norm",
    "_compute_nparams_toprune",
    "_validate_pruning_amount",
    "_validate_pruning_amount_init",
    "_validate_pruning_dim",
    "_validate_structured_pruning",
)


if not TYPE_CHECKING:  # a checker would take any name for one of the library

    def __getattr__(name: str) -> object:
        """Import a name of the library, and what it needs, when it is first used.

        The command line is a part of this package, and its ``--help`` need not wait seconds for
        torch. A first pruning needs half of the library.
        """
        if name not in __all__ and name not in _OF_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _homes().get(name, _TABLE)
        if home == __name__:  # a module of its own
            value = importlib.import_module(f"{home}.{name}")
        else:
            value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value

    _TABLE = "distprune._public"
    _found: dict[str, str] = {}

    def _homes() -> dict[str, str]:
        """The modules of the public names: the table of imports is read, not run.

        Names that are not in it, and all of them where there is no source, come from the table.
        """
        if not _found:
            import importlib.util
            import re

            spec = importlib.util.find_spec(_TABLE)
            loader = None if spec is None else spec.loader
            source = loader.get_source(_TABLE) if hasattr(loader, "get_source") else None
            line = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)
            _found.update((name, home) for home, name in line.findall(source or ""))
        return _found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
