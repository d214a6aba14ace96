"""What the callbacks for Lightning have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from distprune._common.naming import named_modules
from distprune.api.local import remove
from distprune.masks.checks import check_removable
from distprune.masks.hook import PruningHook, find_hook

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError(
        "distprune.integrations.lightning needs Lightning: pip install 'distprune[lightning]'."
    ) from error

from distprune.integrations._lightning_checkpoints import MaskedCheckpoints

if TYPE_CHECKING:
    # A type that does not depend on the stubs of Lightning's Callback.
    from lightning.pytorch.callbacks import Callback
else:
    Callback = pl.Callback

_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")


class LightningPruning(Callback):
    """Base of both callbacks: checkpoints with masks, and zeros that become permanent.

    Attributes:
        checkpoints: of the present run.
    """

    checkpoints: MaskedCheckpoints | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work, and let checkpoints bring their masks with them.

        Raises:
            NotImplementedError: another strategy, or a second callback of this library.
        """
        strategy = trainer.strategy
        if not any(base.__name__ in _SUPPORTED for base in type(strategy).__mro__):
            raise NotImplementedError(
                f"{type(strategy).__name__} is not supported by distprune; expected a single "
                "device, DDPStrategy, FSDPStrategy or ModelParallelStrategy."
            )
        others = [c for c in trainer.callbacks if isinstance(c, LightningPruning)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise NotImplementedError(
                f"the Trainer has {len(others)} callbacks that prune "
                f"({', '.join(type(c).__name__ for c in others)}); expected one. A recipe with "
                "groups gives parts of a model budgets of their own."
            )
        if self.checkpoints is not None:
            self.checkpoints.release()
        self.checkpoints = MaskedCheckpoints(
            strategy, lambda model: self._before_loading(trainer, model)
        )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the strategy as it was."""
        if self.checkpoints is not None:
            self.checkpoints.release()

    def _before_loading(self, trainer: pl.Trainer, model: nn.Module) -> None:
        """Called before a checkpoint changes the model."""


def remove_all(model: nn.Module) -> None:
    """Make the zeros of all pruned parameters permanent; see ``distprune.remove``."""
    pruned = [
        (module, hook._tensor_name)
        for _, module in named_modules(model)
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, PruningHook)
    ]
    for module, name in pruned:
        check_removable(module, name)
    for module, name in pruned:
        # It may have been removed with a parameter to which it is tied.
        if find_hook(module, name) is not None:
            remove(module, name)


def called(value: Any, epoch: int) -> Any:
    """An argument that may be a function of the epoch."""
    function: Callable[[int], Any] | None = value if callable(value) else None
    return value if function is None else function(epoch)
