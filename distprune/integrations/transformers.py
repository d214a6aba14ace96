"""Prune while Hugging Face's Trainer trains: one callback.

    callback = PruningCallback(
        schedule.Cubic(begin=100, end=1000, frequency=100, final_sparsity=0.8)
    )
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train()  # resume_from_checkpoint=True goes on where an earlier run stopped
    trainer.save_model("pruned")  # an ordinary model, with the zeros in its weights

[Note: resuming] The Trainer's checkpoints contain ``weight_orig`` and ``weight_mask`` of pruned
parameters. A resuming Trainer loads them before it starts any callback, into a model that is not
pruned yet, and only warns of keys that do not fit. So the callback hooks into the model's
``load_state_dict`` when the Trainer is made, and gives the model the masks that a state dict
has. The position in the schedule is saved in ``trainer_state.json``. Under FSDP the Trainer wraps
the model and loads the checkpoint into it in one go, with no hook between: there
``callback.attach(trainer)`` extends the Trainer's own loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from distprune.api.local import is_pruned
from distprune.checkpoint import prepare_for_load
from distprune.integrations import PlannedPruning, add_masks, logger, pruning_state
from distprune.integrations.accelerate import keys_of_model, load_criterion, save_criterion
from distprune.ranks.collectives import world

_CRITERION = "distprune_criterion"  # in the folder of a checkpoint


class PruningCallback(PlannedPruning, TrainerCallback, ExportableState):
    """Prunes after the optimizer's steps, by a schedule or a recipe.

    Pass it to ``Trainer(..., callbacks=[callback])``, on every process; ``add_callback`` is too
    late for a run that resumes. Under FSDP call :meth:`attach`, too. The schedule's steps are the
    Trainer's: after step ``n``, ``global_step`` is ``n + 1``. The present sparsity is logged as
    "sparsity" in ``trainer.state.log_history``, and the logger "distprune.integrations" reports
    each pruning (INFO).

    Args:
        plan: a schedule; a recipe, or the path of one; or, for everything else, a function that
            makes a ``ScheduledPruner`` for the model that the Trainer has prepared.
        criterion: what ranks, instead of the magnitude: a class of ``distprune.criteria``
            (``Movement``, ``SNIP``), or a function of the (module, name) pairs
            (``functools.partial(criteria.Taylor, unit="global_batch")``). It sees the
            averaged gradient of every step as the optimizer does: clipped, so that steps with a
            large gradient count less, unless ``max_grad_norm=0``. With a schedule only.
            Checkpoints have what it has collected.
        reset_criterion: forget what the criterion has collected after each pruning.
        options: what to prune (include, exclude, types, names), as for ``select``, and other
            arguments of ``ScheduledPruner`` (scope, pattern, ...); with a schedule only.
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

    _is_attached = False
    _resumed_from: Path | None = None

    def attach(self, trainer: Trainer) -> None:
        """Let a Trainer resume a pruned model under FSDP; call it before ``trainer.train``.

        The Trainer's ``_load_from_checkpoint`` first gives the wrapped model the masks that the
        checkpoint has. See [Note: resuming]. Not needed on one process and under DDP.

        Cost: memory for the masks; a few small all-reduces; each rank reads the names of the
        tensors.
        """
        load = trainer._load_from_checkpoint

        def load_masked(
            resume_from_checkpoint: str, model: nn.Module | None = None, **kwargs: Any
        ) -> None:
            self._resumed_from = folder = Path(resume_from_checkpoint)
            if trainer.is_fsdp_enabled:
                keys = world().run(lambda: keys_of_model(folder))
                wrapped = model if model is not None else trainer.model
                assert wrapped is not None
                prepare_for_load(wrapped, keys)
            load(resume_from_checkpoint, model, **kwargs)

        setattr(trainer, "_load_from_checkpoint", load_masked)  # noqa: B010
        self._is_attached = True

    def state(self) -> dict[str, Any]:
        """The state that the Trainer writes into ``trainer_state.json``."""
        has_state = self.pruner is not None
        state = pruning_state(self._model, self.pruner) if has_state else {"pruning": None}
        return {"args": {}, "attributes": state}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse settings that cannot work, and prepare the model for loading masks."""
        problems = {
            f"the Trainer would copy the model to {args.n_gpu} GPUs by nn.DataParallel, at every "
            "step; start it with torchrun, or show it one GPU (CUDA_VISIBLE_DEVICES=0).": (
                args.n_gpu > 1
            ),
            "load_best_model_at_end=True would bring back the checkpoint with the lowest loss, "
            "which is likely one that is hardly pruned; set it to False.": (
                args.load_best_model_at_end
            ),
            "restore_callback_states_from_checkpoint=True makes new callbacks, without their "
            "schedule; set it to False.": args.restore_callback_states_from_checkpoint,
            "criterion= reads averaged gradients, and DeepSpeed leaves the Trainer no moment "
            "between backward and step; expected pruning by magnitude, or scores that were "
            "collected before.": args.deepspeed and self._make_criterion is not None,
        }
        for problem, has_it in problems.items():
            if has_it:
                raise NotImplementedError(problem)
        if (model := kwargs.get("model")) is not None:
            model.register_load_state_dict_pre_hook(add_masks)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the pruner, and load its state from the checkpoint of a resumed run."""
        model: nn.Module = kwargs["model"]
        if args.fsdp and args.save_strategy != "no" and not self._is_attached:
            raise NotImplementedError(
                "under FSDP the Trainer loads a checkpoint in one go with wrapping the model, and "
                "could not resume a pruned one; expected callback.attach(trainer) before "
                'trainer.train(), or save_strategy="no".'
            )
        pruner = self._start(model, state.max_steps)
        callbacks: object = state.stateful_callbacks  # declared as a list; loaded as a dict
        saved = callbacks.get(type(self).__name__) if isinstance(callbacks, dict) else None
        if isinstance(saved, list):
            raise NotImplementedError(
                f"the Trainer has {len(saved)} callbacks of type {type(self).__name__}; expected "
                "one."
            )
        attributes = (saved or {}).get("attributes", {})
        if attributes.get("pruning") is not None and state.global_step > 0:
            problem = (
                "its masks were not loaded; expected the callback in Trainer(..., "
                "callbacks=[...]), before the checkpoint is read."
            )
            self._resume(attributes, problem)
        pruner.num_steps = state.global_step
        if self._criterion is not None and state.global_step > 0:
            folder = (self._resumed_from or _checkpoint(args, state)) / _CRITERION
            if not world().run(folder.is_dir):
                raise ValueError(
                    f"{folder} is missing, with what {type(self._criterion).__name__} has "
                    "collected; expected a checkpoint that was saved with the same criterion. Call "
                    "callback.attach(trainer) to resume from another folder than "
                    "output_dir/checkpoint-<step>."
                )
            load_criterion(self._criterion, folder)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the criterion read the gradients."""
        if self._criterion is not None:
            self._criterion.update()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what the criterion has collected into the checkpoint."""
        if self._criterion is not None:
            save_criterion(self._criterion, _checkpoint(args, state) / _CRITERION)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prune if a pruning is due."""
        if self._prune() is not None:
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the sparsity to the logged values."""
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if self.pruner is None or "loss" not in logs:
            return
        logs["sparsity"] = self.pruner.sparsity
        if state.log_history:
            state.log_history[-1]["sparsity"] = self.pruner.sparsity

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the zeros permanent if ``permanent``; else warn how the model has to be saved."""
        model: nn.Module | None = kwargs.get("model")
        if self._permanent:
            self.make_permanent()
        elif model is not None and is_pruned(model) and state.is_world_process_zero:
            logger.warning(
                "training ends, and the model is still pruned: save_model and save_pretrained "
                "write weight_orig and weight_mask, which from_pretrained does not know: it would "
                "initialise such layers at random. Call make_permanent() first, or "
                "distprune.checkpoint.save_pretrained(model, path)."
            )


def _checkpoint(args: Any, state: Any) -> Path:
    """Where the Trainer saves at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
