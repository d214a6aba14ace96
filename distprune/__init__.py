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
else:

    def __getattr__(name: str) -> object:
        """Import the library when a public name is first used: ``--help`` need not wait for it."""
        public = vars(importlib.import_module("distprune._public"))
        if name == "__all__":
            return sorted(key for key in public if not key.startswith("_"))
        if name not in public:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = public[name]
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
