"""Prune while Hugging Face's Trainer trains: one callback.

    callback = PruningCallback(
        schedule.Cubic(begin=100, end=1000, frequency=100, final_sparsity=0.8), exclude="lm_head"
    )
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train()  # resume_from_checkpoint=True goes on where an earlier run stopped
    trainer.save_model("pruned")  # an ordinary model, with the zeros in its weights

[Note: resuming] The Trainer's checkpoints contain ``weight_orig`` and ``weight_mask`` of pruned
parameters. A resuming Trainer loads them before it starts any callback, into a model that is not
pruned yet, and only warns of keys that do not fit. So the callback hooks into the model's
``load_state_dict`` when the Trainer is made, and gives the model the masks that a state dict
has. The position in the schedule is saved in ``trainer_state.json``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from distprune._common.process_groups import world
from distprune._common.pruned_form import mask_key, name_of_pruned_mask
from distprune.api.global_unstructured import global_unstructured
from distprune.api.local import is_pruned
from distprune.api.select import select
from distprune.call.arguments import ParameterArguments
from distprune.call.report import PruningReport
from distprune.call.run import count_pruned
from distprune.methods.builtin import L1Unstructured
from distprune.recipe import Recipe, load_recipe
from distprune.schedule.functions import Schedule
from distprune.schedule.pruner import ScheduledPruner
from distprune.verification.records import put_records, records_of
from distprune.verification.verifying import verify

logger = logging.getLogger(__name__)


class PruningCallback(TrainerCallback, ExportableState):
    """Prunes after the optimizer's steps, by a schedule or a recipe.

    Pass it to ``Trainer(..., callbacks=[callback])``, on every process; ``add_callback`` is too
    late for a run that resumes. The schedule's steps are the Trainer's: after step ``n``,
    ``global_step`` is ``n + 1``. The present sparsity is logged as "sparsity" in
    ``trainer.state.log_history``, and this module's logger reports each pruning (INFO).

    Args:
        plan: a schedule; a recipe, or the path of one; or, for everything else, a function that
            makes a ``ScheduledPruner`` for the model that the Trainer has prepared.
        include, exclude, types, names: what to prune, as for ``select``; with a schedule only.
        permanent: make the zeros permanent when training ends, so that ``save_model`` writes an
            ordinary model. Checkpoints of the training keep their masks. If False, call
            :meth:`make_permanent` before saving for others, or save with
            ``distprune.checkpoint.save_pretrained``: ``from_pretrained`` does not know
            ``weight_orig``, and would initialise such weights at random. A warning says so.
        verify_every: number of the Trainer's steps after which to check that the masks act, and
            are those that the last pruning left; the training stops with an error if not. See
            ``distprune.verify``. None: never.

    Attributes:
        pruner: the ScheduledPruner; None before training.
        last_report: of the last pruning on this process, the same on all; None before it.

    Raises:
        TypeError: a plan of another type, or a selection for a plan that has its own.
    """

    def __init__(
        self,
        plan: Schedule | Recipe | str | Path | Callable[[nn.Module], ScheduledPruner],
        *,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        types: type | tuple[type, ...] | None = None,
        names: str | Sequence[str] = ("weight",),
        permanent: bool = True,
        verify_every: int | None = None,
    ) -> None:
        if isinstance(plan, str | Path):
            plan = load_recipe(plan)
        if not isinstance(plan, Schedule | Recipe) and not callable(plan):
            raise TypeError(
                f"plan is a {type(plan).__name__}; expected a schedule such as "
                "distprune.schedule.Cubic(...), a recipe, its path, or a function of the model "
                "that returns a ScheduledPruner."
            )
        has_selection = (include, exclude, types, names) != (None, (), None, ("weight",))
        if not isinstance(plan, Schedule) and has_selection:
            raise TypeError(
                "include, exclude, types and names go with a schedule; expected the selection in "
                "the recipe, or in the function."
            )
        self._plan = plan
        self._select = functools.partial(
            select, include=include, exclude=exclude, types=types, names=names
        )
        self._permanent = permanent
        if verify_every is not None and verify_every < 1:
            raise ValueError(
                f"verify_every={verify_every!r}; expected a number of steps >= 1, or None."
            )
        self._verify_every = verify_every
        self.pruner: ScheduledPruner | None = None
        self._model: nn.Module | None = None
        self.last_report: PruningReport | None = None

    def make_permanent(self) -> None:
        """Make the zeros permanent: ordinary parameters, which any program can load.

        Call it on every process. It ends the pruning; a further ``train()`` starts a new one.
        """
        if self.pruner is not None:
            self.pruner.remove()

    def state(self) -> dict[str, Any]:
        """The state that the Trainer writes into ``trainer_state.json``."""
        if self.pruner is None:
            return {"args": {}, "attributes": {"pruning": None}}
        attributes = {"pruning": self.pruner.state_dict()}
        if self._model is not None:
            attributes["masks"] = records_of(self._model)
        return {"args": {}, "attributes": attributes}

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Refuse settings that cannot work, and prepare the model for loading masks."""
        _check_arguments(args)
        if model is not None:
            register: Callable[[Callable[..., None]], object] = (
                model.register_load_state_dict_pre_hook
            )
            register(_add_masks)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the pruner, and load its state from the checkpoint of a resumed run."""
        assert model is not None
        pruner = self._make_pruner(model)
        parameters = pruner.parameters
        # Raises for parameters that cannot be pruned, before hours of training.
        count_pruned(lambda: ParameterArguments(parameters=parameters), world())
        callbacks: object = state.stateful_callbacks  # declared as a list; loaded as a dict
        saved = callbacks.get(type(self).__name__) if isinstance(callbacks, dict) else None
        if isinstance(saved, list):
            raise NotImplementedError(
                f"the Trainer has {len(saved)} callbacks of type {type(self).__name__}; expected "
                "one. A recipe with groups gives parts of a model budgets of their own."
            )
        attributes = (saved or {}).get("attributes", {})
        if attributes.get("pruning") is not None and state.global_step > 0:
            pruner.load_state_dict(attributes["pruning"])
            put_records(model, attributes.get("masks", {}))
            if pruner.sparsity > 0 and not any(is_pruned(module) for module, _ in parameters):
                raise RuntimeError(
                    f"the checkpoint of step {state.global_step} is pruned to "
                    f"{pruner.sparsity:.2%}, and its masks were not loaded; expected the callback "
                    "in Trainer(..., callbacks=[...]), before the checkpoint is read."
                )
        pruner.num_steps = state.global_step
        self.pruner, self._model = pruner, model
        self._warn_of_an_early_end(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prune if a pruning is due."""
        assert self.pruner is not None
        report = self.pruner.step()
        if self._verify_every is not None and state.global_step % self._verify_every == 0:
            assert self._model is not None
            verify(self._model, expected=self.pruner.pruned_parameters)
        if report is None:
            return
        self.last_report = report
        control.should_log = True
        if state.is_world_process_zero:
            logger.info("step %d: pruned to %.4f\n%s", state.global_step, report.sparsity, report)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the sparsity to the logged values."""
        if self.pruner is None or logs is None or "loss" not in logs:
            return
        logs["sparsity"] = self.pruner.sparsity
        if state.log_history:
            state.log_history[-1]["sparsity"] = self.pruner.sparsity

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the zeros permanent if ``permanent``; else warn how the model has to be saved."""
        if self._permanent:
            self.make_permanent()
        elif model is not None and is_pruned(model) and state.is_world_process_zero:
            logger.warning(
                "training ends, and the model is still pruned: save_model and save_pretrained "
                "write weight_orig and weight_mask, which from_pretrained does not know: it would "
                "initialise such layers at random. Call make_permanent() first, or "
                "distprune.checkpoint.save_pretrained(model, path)."
            )

    def _make_pruner(self, model: nn.Module) -> ScheduledPruner:
        if isinstance(self._plan, Recipe):
            return self._plan.pruner(model)
        if isinstance(self._plan, Schedule):
            return ScheduledPruner(self._select(model), self._plan)
        pruner = self._plan(model)
        if not isinstance(pruner, ScheduledPruner):
            raise TypeError(f"plan returned a {type(pruner).__name__}; expected a ScheduledPruner.")
        return pruner

    def _warn_of_an_early_end(self, state: TrainerState) -> None:
        schedules = []
        if isinstance(self._plan, Schedule):
            schedules = [self._plan]
        elif isinstance(self._plan, Recipe):
            schedules = [group.schedule for group in self._plan.groups]
        for schedule in schedules:
            end, reached = schedule.ends_at, schedule.sparsity_at(state.max_steps - 1)
            if end is not None and reached < end:
                logger.warning(
                    "training ends after %d steps at sparsity %g, before the schedule does at %g: "
                    "%s",
                    state.max_steps, reached, end, schedule,
                )  # fmt: skip


def _check_arguments(args: TrainingArguments) -> None:
    """Raise for settings under which pruning would fail later, or silently not work."""
    if args.deepspeed:
        raise NotImplementedError(
            "DeepSpeed is not supported by distprune; expected one process, DDP or FSDP."
        )
    if args.n_gpu > 1:
        raise NotImplementedError(
            f"the Trainer would copy the model to {args.n_gpu} GPUs by nn.DataParallel, at every "
            "step, which distprune does not support; start it with torchrun, or show it one GPU "
            "(CUDA_VISIBLE_DEVICES=0)."
        )
    if args.fsdp and args.save_strategy != "no":
        raise NotImplementedError(
            "the Trainer cannot resume a pruned model under FSDP: it loads a checkpoint in one go "
            'with wrapping the model. Set save_strategy="no", or save and resume in a loop of your '
            "own (docs/saving.md has one)."
        )
    if args.load_best_model_at_end:
        raise NotImplementedError(
            "load_best_model_at_end=True would bring back the checkpoint with the lowest loss, "
            "which is likely one that is hardly pruned; set it to False."
        )
    if args.restore_callback_states_from_checkpoint:
        raise NotImplementedError(
            "restore_callback_states_from_checkpoint=True makes new callbacks, without their "
            "schedule; set it to False. PruningCallback restores its state by itself."
        )


def _add_masks(model: nn.Module, state_dict: dict[str, Tensor], *args: Any) -> None:
    """Give the model the masks of a state dict before it is loaded; see [Note: resuming]."""
    pruned = (name_of_pruned_mask(key, state_dict) for key in state_dict)
    names = {name for name in pruned if name is not None}
    if not names:
        return
    pairs = select(model, "*", names=sorted({name.rpartition(".")[2] for name in names}))
    missing = [p for p in pairs if p.fqn in names and mask_key(p[1]) not in p[0]._buffers]
    if missing:
        # Masks of ones, under all names of a tied parameter.
        global_unstructured(missing, L1Unstructured, amount=0)
