"""ModelPruning: the interface of Lightning's callback, on every strategy."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distprune._common.amount import Amount
from distprune._common.hashing import draw_seed
from distprune._common.naming import NamedParameter, unwrap
from distprune._common.process_groups import is_distributed, world
from distprune.api import local
from distprune.api.global_unstructured import global_unstructured
from distprune.api.select import select
from distprune.api.starting_values import StartingValues
from distprune.call.arguments import ParameterArguments
from distprune.call.report import ParameterReport
from distprune.call.run import count_pruned
from distprune.integrations._lightning_base import LightningPruning, called, remove_all
from distprune.methods.base import BasePruningMethod
from distprune.methods.builtin import L1Unstructured, RandomUnstructured
from distprune.verification.records import put_records, records_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

from lightning.fabric.utilities.exceptions import MisconfigurationException

logger = logging.getLogger(__name__)

Pairs = Sequence[tuple[nn.Module, str]]
_LOCAL: dict[str, Callable[..., Any]] = {
    "ln_structured": local.ln_structured,
    "l1_unstructured": local.l1_unstructured,
    "random_structured": local.random_structured,
    "random_unstructured": local.random_unstructured,
}
_GLOBAL: dict[str, type[BasePruningMethod]] = {
    "l1_unstructured": L1Unstructured,
    "random_unstructured": RandomUnstructured,
}
# Classes of torch by name: it need not be imported for them.
_OF_TORCH: dict[tuple[str, str], type[BasePruningMethod]] = {
    ("torch.nn.utils.prune", method.__name__): method for method in _GLOBAL.values()
}


class ModelPruning(LightningPruning):
    """Prunes at the end of epochs, with the arguments of Lightning's ``ModelPruning``.

    It prunes exactly ``amount``, over all ranks, and the masks are those of one process. What is
    different from Lightning's own callback:

    - It works under FSDP and ModelParallel, also on modules that ``configure_model`` makes.
    - Checkpoints of the training keep ``weight_orig`` and ``weight_mask``, and a resumed run has
      its masks again; Lightning's has lost them. Zeros become permanent when training ends.
      ``distprune.checkpoint.fold(checkpoint["state_dict"])`` makes an ordinary state dict of a
      checkpoint.
    - The lottery ticket's starting values are those before training, each time, and after resuming:
      a run that resumes has to start from the same initialisation, which a checksum in the
      checkpoint shows.
    - Random pruning is the same on all ranks.

    Args:
        pruning_fn: "l1_unstructured", "random_unstructured", "ln_structured" or
            "random_structured"; or a subclass of ``distprune.BasePruningMethod``, or one of these
            two of torch's classes: ``L1Unstructured``, ``RandomUnstructured``.
        parameters_to_prune: (module, name) pairs; or a function that returns them, of the
            LightningModule as it is when training starts, for modules that do not exist before.
            By default every parameter that has one of ``parameter_names``.
        parameter_names: "weight", "bias" or both, the default.
        use_global_unstructured: one ranking over all parameters; if not, ``amount`` is pruned of
            each.
        amount: a fraction of what is unpruned, or a count; or a function of the epoch.
        apply_pruning: whether to prune; or a function of the epoch.
        make_pruning_permanent: make the zeros permanent when training ends.
        use_lottery_ticket_hypothesis: after each pruning, set what is left to its starting
            values; or a function of the epoch.
        resample_parameters: set it to new random values instead, of ``reset_parameters``.
        pruning_dim: the channels' dimension, for structured pruning.
        pruning_norm: the order of the norm, for "ln_structured".
        verbose: 1 logs the sparsity, 2 also that of each parameter (INFO, on the first rank).
        prune_on_train_epoch_end: if not, prune at the end of the validation.

    Raises:
        MisconfigurationException: as Lightning's.

    Cost: that of a global pruning per epoch. With the lottery ticket, memory for the starting
    values of this rank's shards, and a pass over them.
    """

    PARAMETER_NAMES = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Pairs | Callable[[pl.LightningModule], Pairs] = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        self._parameter_names = tuple(parameter_names or self.PARAMETER_NAMES)
        for name in self._parameter_names:
            if name not in self.PARAMETER_NAMES:
                raise MisconfigurationException(
                    f"parameter_names has {name!r} in it; expected names of {self.PARAMETER_NAMES}."
                )
        self._is_global = use_global_unstructured
        self._method_name, self._prune = _pruning(
            pruning_fn, use_global_unstructured, pruning_dim, pruning_norm
        )
        if not isinstance(amount, int | float) and not callable(amount):
            raise MisconfigurationException(
                f"amount={amount!r}; expected an int, a float, or a function of the epoch."
            )
        if verbose not in (0, 1, 2):
            raise MisconfigurationException(f"verbose={verbose!r}; expected 0, 1 or 2.")
        self.amount = amount
        self._given = parameters_to_prune
        self._applies = apply_pruning
        self._is_permanent = make_pruning_permanent
        self._uses_lottery_ticket = use_lottery_ticket_hypothesis
        self._resamples = resample_parameters
        self._verbose = verbose
        self._prunes_after_training = prune_on_train_epoch_end
        self._pairs: Pairs = ()
        self._starting_values: StartingValues | None = None
        self._saved: Mapping[str, Any] | None = None
        self._model: nn.Module | None = None

    def filter_parameters_to_prune(self, parameters_to_prune: Pairs = ()) -> Pairs:
        """To be overridden: takes all (module, name) pairs, returns those to prune."""
        return parameters_to_prune

    def apply_pruning(self, amount: int | float) -> None:
        """Prune ``amount`` now, on every rank."""
        before = self._count() if self._verbose else ()
        if self._is_global:
            self._prune(self._pairs, amount=amount)
        else:
            with _same_random_numbers():
                for module, name in self._pairs:
                    self._prune(unwrap(module), name, amount=amount)
        after = self._count() if self._verbose else ()
        if self._verbose and world().index == 0:
            self._log(before, after, amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Set what is left to the values before training, or to new random ones.

        Source: Frankle and Carbin, The Lottery Ticket Hypothesis, arXiv 1803.03635, section 1.
        """
        assert self._starting_values is not None
        if self._resamples:
            self._starting_values.resample()
        else:
            self._starting_values.restore()

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Make the zeros in a module, and those below it, permanent."""
        remove_all(module)

    def state_dict(self) -> dict[str, Any]:
        """The records of the masks, and a checksum of the starting values, in plain values."""
        if self._model is None:
            return {}
        starting = self._starting_values
        return {
            "masks": records_of(self._model),
            "starting_values": None if starting is None else starting.checksum,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._saved = self._starting_values = None

    def _before_loading(self, trainer: pl.Trainer, model: nn.Module) -> None:
        if trainer.state.fn == "fit":
            self._keep_starting_values(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the starting values, unless a checkpoint has been loaded already (DDP)."""
        self._keep_starting_values(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check what is to be pruned, and take up the state of a resumed run.

        Raises:
            ValueError: the starting values are not those of the run that is resumed.
        """
        model = trainer.model
        assert model is not None
        self._model = model
        self._pairs = self._parameters_of(trainer)
        self._count()  # raises for parameters that cannot be pruned
        saved, self._saved = self._saved, None
        if not saved:
            return
        put_records(model, saved["masks"])
        old, new = saved["starting_values"], self._starting_values
        if not self._resamples and old is not None and new is not None and old != new.checksum:
            raise ValueError(
                "the parameters had other values before training than in the run that is resumed, "
                "so the lottery ticket's values are unknown; expected the same initialisation: "
                "call lightning.pytorch.seed_everything before the model is made, on every rank, "
                "or load the same initial weights."
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._prunes_after_training:
            self._run_pruning(trainer.current_epoch)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_training and not self._prunes_after_training:
            self._run_pruning(trainer.current_epoch)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_permanent and self._model is not None:
            self.make_pruning_permanent(self._model)

    def _run_pruning(self, epoch: int) -> None:
        def decide() -> tuple[int | float, bool]:
            amount = called(self.amount, epoch)
            applies = bool(called(self._applies, epoch))
            if not applies or not amount:
                return 0, False
            return amount, bool(called(self._uses_lottery_ticket, epoch))

        amount, uses_lottery_ticket = world().run(decide)
        if not amount:
            return
        self.apply_pruning(amount)
        if uses_lottery_ticket:
            self.apply_lottery_ticket_hypothesis()

    def _keep_starting_values(self, trainer: pl.Trainer) -> None:
        if self._uses_lottery_ticket and self._starting_values is None:
            self._starting_values = StartingValues(self._parameters_of(trainer))

    def _parameters_of(self, trainer: pl.Trainer) -> Pairs:
        """The parameters to prune, with their full names; a collective follows."""
        with world().raising_everywhere():
            return self._found(trainer)

    def _found(self, trainer: pl.Trainer) -> Pairs:
        assert trainer.model is not None
        module = trainer.lightning_module
        given = self._given(module) if callable(self._given) else self._given
        every = {
            (id(place[0]), place[1]): pair
            for pair in select(trainer.model, "*", names=self._names(given))
            for place in pair.places
        }
        if not given:
            found = list({id(pair): pair for pair in every.values()}.values())
            return self.filter_parameters_to_prune(found)
        pairs: list[NamedParameter] = []
        for owner, name in given:
            pair = every.get((id(unwrap(owner)), name))
            if pair is None:
                raise MisconfigurationException(
                    f"parameters_to_prune has {name!r} of a {type(owner).__name__} in it that the "
                    "model does not have; expected (module, name) pairs of its parameters, or a "
                    "function of the LightningModule, for modules that configure_model makes."
                )
            pairs.append(pair)
        return self.filter_parameters_to_prune(pairs)

    def _names(self, given: Pairs) -> list[str]:
        try:
            return list(dict.fromkeys(name for _, name in given)) or list(self._parameter_names)
        except (TypeError, ValueError):
            raise MisconfigurationException(
                f"parameters_to_prune is a {type(given).__name__}; expected (module, name) pairs."
            ) from None

    def _count(self) -> Sequence[ParameterReport]:
        pairs = self._pairs
        return count_pruned(lambda: ParameterArguments(parameters=pairs), world())

    def _log(
        self,
        before: Sequence[ParameterReport],
        after: Sequence[ParameterReport],
        amount: int | float,
    ) -> None:
        total = sum(entry.num_elements for entry in after)
        old, new = (sum(entry.num_pruned for entry in entries) for entries in (before, after))
        logger.info(
            "Applied `%s`. Pruned: %d/%d (%.2f%%) -> %d/%d (%.2f%%)",
            self._method_name, old, total, 100 * old / total, new, total, 100 * new / total,
        )  # fmt: skip
        for one, other in zip(before, after, strict=True) if self._verbose == 2 else ():
            size = max(other.num_elements, 1)
            logger.info(
                "Applied `%s` to `%s` with amount=%s. Pruned: %d (%.2f%%) -> %d (%.2f%%)",
                self._method_name, other.name, amount, one.num_pruned,
                100 * one.num_pruned / size, other.num_pruned, 100 * other.num_pruned / size,
            )  # fmt: skip


def _pruning(
    pruning_fn: object, is_global: bool, dim: int | None, norm: int | None
) -> tuple[str, Callable[..., Any]]:
    """The name of what prunes, and a function of the pairs and the amount (or of one pair)."""
    if isinstance(pruning_fn, str):
        name = pruning_fn.lower()
        if name not in _LOCAL:
            raise MisconfigurationException(
                f"pruning_fn={pruning_fn!r}; expected one of {list(_LOCAL)}, or a subclass of "
                "distprune.BasePruningMethod."
            )
        options: dict[str, Any] = {}
        if name.endswith("_structured"):
            if dim is None:
                raise MisconfigurationException(f"{name} needs pruning_dim; expected an int.")
            options["dim"] = dim
            if name == "ln_structured":
                if norm is None:
                    raise MisconfigurationException(f"{name} needs pruning_norm; expected an int.")
                options["n"] = norm
            if is_global:
                raise MisconfigurationException(
                    f"{name} with use_global_unstructured=True; expected False for structured "
                    "pruning."
                )
        if not is_global:
            function = _LOCAL[name]
            return name, lambda module, name, amount: function(
                module, name, amount=amount, **options
            )
        method = _GLOBAL[name]
    else:
        if not is_global:
            raise MisconfigurationException(
                f"pruning_fn={pruning_fn!r} with use_global_unstructured=False; expected a name of "
                f"{list(_LOCAL)}."
            )
        kind = pruning_fn if isinstance(pruning_fn, type) else type(None)
        given: Any = _OF_TORCH.get((kind.__module__, kind.__name__), kind)
        if not issubclass(given, BasePruningMethod):
            raise MisconfigurationException(
                f"pruning_fn={pruning_fn!r}; expected one of {list(_LOCAL)}, or a subclass (not an "
                "instance) of distprune.BasePruningMethod, which has the interface of torch's and "
                "says how masks are computed on shards."
            )
        if given.PRUNING_TYPE != "unstructured":
            raise MisconfigurationException(
                f"{given.__name__} has PRUNING_TYPE={given.PRUNING_TYPE!r}; expected "
                "'unstructured' with use_global_unstructured=True."
            )
        method = given

    def prune(pairs: Pairs, amount: Amount) -> None:
        if "amount" in inspect.signature(method).parameters:
            global_unstructured(pairs, method, amount=amount)
        else:
            global_unstructured(pairs, pruning_method=method)

    return method.__name__, prune


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Random numbers of the leading rank on all ranks: replicas of DDP each draw their own."""
    if not is_distributed():
        yield
        return
    seed = int(world().leader_of(1, draw_seed)[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
