"""The stages of `prune_language_model.py`; each is done once, also if the run is killed between."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distprune as prune
from distprune import language_models
from distprune.language_models import KeptStates, TextScores, TokenWindows
from jobs.checkpoints import Checkpoints
from jobs.processes import Job
from jobs.ranking import Pairs
from jobs.work import Folder, read_json

from .document import card, draw_layers, perplexity_table, recipe_of, sparsity_table
from .pruning import make_pruner, prune_and_move, prune_block_by_block, prune_in_one_shot
from .recovery import recover
from .settings import Settings

REPORT = "report.json"
Stages = dict[str, dict[str, Any]]  # perplexity by stage: "dense", "pruned", "recovered"


class Run:
    """One run of the script. Collective: every rank calls the same methods.

    Results of stages are kept in `OUT.work` until the end: perplexity, statistics, masks, and
    checkpoints of the recovery.
    """

    def __init__(self, settings: Settings, job: Job) -> None:
        self.settings = settings
        self.job = job
        self.work = Folder(
            settings.output.with_name(f"{settings.output.name}.work"), settings.facts(), job
        )
        self.stages: Stages = {}

    def run(self) -> None:
        """All stages."""
        settings, job = self.settings, self.job
        model = self.model
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        job.say(f"loaded {settings.model}: {job.num_ranks} ranks, {settings.wrap}, {dtype}")
        self.say_memory()
        self.measure("dense")
        recovers_while_pruning = settings.schedule != "one_shot"
        if not recovers_while_pruning:
            rows = self.prune()
            self.measure("pruned")
        if settings.recovery_steps:
            model, events = self.recover()
            if recovers_while_pruning:
                rows = events[-1]["parameters"]
            self.measure("recovered", model)
        self.save(model, rows)
        self.work.remove()

    def say_memory(self) -> None:
        """What a rank needs at most, beside what there is."""
        settings, read, kept = self.settings, [], 0
        if settings.recovery_steps and settings.lora is None:
            read, kept = [p for p in self.model.parameters() if p.requires_grad], 2  # of AdamW
        elif settings.criterion in ("taylor", "fisher", "factored_fisher"):
            read = [getattr(*pair) for pair in self.parameters]
            kept = int(settings.criterion != "factored_fisher")
        estimate = language_models.estimate_memory(
            self.model,
            settings.batch_size * settings.length,
            gradients_of=read,
            values_kept=kept,
        )
        self.job.say(f"memory of a rank, estimated: {estimate}")
        available = language_models.available_memory(self.job.device)
        needed = estimate.total - estimate.parts["weights"]  # which are there
        if available is not None and needed > available:
            self.job.say(
                f"WARNING: beside the weights a rank needs {needed / 1e9:.2f} GB, and has "
                f"{available / 1e9:.2f} GB; the system may end the run. Expected more ranks or "
                "machines with --wrap fsdp2, or a smaller --length or --batch-size"
            )

    @cached_property
    def model(self) -> nn.Module:
        """The model as it was loaded."""
        settings = self.settings
        mesh = None
        if settings.wrap == "fsdp2_tp":
            mesh = (self.job.num_ranks // settings.tensor_parallel, settings.tensor_parallel)
        dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
        model = language_models.load_sharded(
            settings.model, wrap=settings.wrap, mesh=mesh, dtype=dtype, device=self.job.device
        )
        return model.eval()

    @cached_property
    def parameters(self) -> Pairs:
        include, exclude = self.settings.include or None, self.settings.exclude
        return prune.select(self.model, include, exclude)

    @cached_property
    def tokenizer(self) -> Any:
        return language_models.load_tokenizer(self.settings.model)

    def windows(self, files: tuple[Path, ...], limit: int | None = None) -> TokenWindows:
        return language_models.read_windows(
            self.tokenizer, files, self.settings.length, limit=limit
        )

    @cached_property
    def scores(self) -> TextScores:
        """What criteria learn from the text."""
        settings = self.settings
        windows = None
        if settings.calibrate:
            windows = self.windows(settings.calibrate)
            windows = windows.sample(min(settings.windows, len(windows)), seed=settings.seed)
        return TextScores(
            self.model,
            windows,
            self.parameters,
            batch_size=settings.batch_size,
            progress=self.job.progress("calibrating"),
            statistics=self.statistics_file,
            gradients=self.work.path / "gradients.safetensors",
        )

    @property
    def statistics_file(self) -> Path:
        """That of the command line, or the one that this run writes if a criterion needs it."""
        return self.settings.statistics or self.work.path / "statistics.safetensors"

    @cached_property
    def evaluation(self) -> TokenWindows:
        return self.windows(self.settings.evaluate, self.settings.evaluation_windows)

    def measure(self, stage: str, model: nn.Module | None = None) -> None:
        """Perplexity, if there is text for it."""
        if not self.settings.evaluate:
            return

        def make() -> dict[str, Any]:
            report = language_models.perplexity(
                self.model if model is None else model,
                self.evaluation,
                batch_size=self.settings.batch_size,
                progress=self.job.progress(f"measuring the {stage} model"),
            )
            return report.as_values()

        self.stages[stage] = self.work.once(f"{stage}.json", make)
        self.job.say(f"{stage}: perplexity {self.stages[stage]['all']['perplexity']:.3f}")

    def prune(self) -> list[dict[str, Any]]:
        """Prune, or load the masks of an earlier run; a row of the report for each parameter."""
        if self.settings.moves_weights:
            return self.prune_and_move()
        rows: list[list[dict[str, Any]]] = []

        def prune_and_save(folder: Path) -> None:
            settings, scores = self.settings, self.scores
            if settings.sequential:
                rows.append(prune_block_by_block(settings, scores, self.work, self.statistics_file))
            else:
                rows.append(prune_in_one_shot(settings, scores))
            prune.save_masks(self.model, folder, names="model")

        masks = self.work.once_folder("masks", prune_and_save)
        if not rows:
            prune.load_masks(self.model, masks)
        return self.work.once("parameters.json", lambda: rows[0])

    def prune_and_move(self) -> list[dict[str, Any]]:
        """Prune and move weights, in rounds, from the last one that an earlier run has finished."""
        num_rounds = len(self.settings.rounds) + 1
        kept = KeptStates(self.model, self.work.path, "round-{}".format)
        finished = kept.finished(num_rounds)
        if finished:
            kept.load(finished - 1)
        rounds = prune_and_move(self.settings, self.scores, self.work, finished)
        for number, rows in enumerate(rounds, finished):
            self.work.once(f"rows-{number}.json", lambda rows=rows: rows)
            kept.save(number)
            kept.remove(number - 1)
            if number + 1 < num_rounds:
                self.job.say(f"round {number + 1} of {num_rounds} is done")
        found = self.work.once(f"rows-{num_rounds - 1}.json", list)
        return list(found)

    def recover(self) -> tuple[nn.Module, list[dict[str, Any]]]:
        """Fine-tune, from the last checkpoint if there is one; the model, and its prunings."""
        settings, model, pruner = self.settings, self.model, None
        if settings.lora is None and any(p.dtype.itemsize < 4 for p in model.parameters()):
            self.job.say(
                "the weights have 16 bits, in which small steps of the optimizer are lost: "
                "--dtype float32 or --lora recovers better"
            )
        if settings.schedule != "one_shot":
            pruner = make_pruner(settings, self.scores)
        if settings.lora is not None:
            from .adapters import add_adapters

            model = add_adapters(model, settings.lora, settings.seed)
        events = recover(
            model,
            self.windows(settings.recover),
            settings.recovery,
            self.job,
            checkpoints=Checkpoints(self.work.path / "checkpoints", {}, self.job),
            checkpoint_every=settings.checkpoint_every,
            pruner=pruner,
        )
        if settings.lora is not None:
            from distprune.integrations.peft import merge_and_unload

            model = merge_and_unload(model)
        return model, events

    def save(self, model: nn.Module, rows: list[dict[str, Any]]) -> None:
        """Write OUT, with the report beside the weights, and say what is in it."""
        settings, folder = self.settings, self.work.path / "document"
        report = {"settings": settings.facts(), "perplexity": self.stages, "parameters": rows}
        sidecar: dict[str, str | Path] = {
            REPORT: json.dumps(report, indent=1),
            "report.txt": f"{perplexity_table(self.stages)}\n\n{sparsity_table(rows)}\n",
        }
        recipe = recipe_of(settings, rows)
        if recipe is not None:
            sidecar["recipe.yaml"] = recipe
        if self.job.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            draw_layers(rows, folder / "sparsity_per_layer.png")
        dist.barrier()
        sidecar["sparsity_per_layer.png"] = folder / "sparsity_per_layer.png"
        statistics = self.statistics_file
        if self.job.of_rank_0(statistics.exists):
            sidecar["statistics.safetensors"] = statistics
        if isinstance(model, DistributedDataParallel):
            model = model.module
        saved = language_models.save_sharded(
            model,
            settings.output,
            source=settings.model,
            sidecar=sidecar,
            files={"README.md": card(settings, self.stages, rows)},
        )
        num_pruned = sum(row["num_pruned"] for row in rows)
        num_zeros = sum(saved.zeros.values())  # the model may have had some before
        counts = f"{num_pruned:,} weights are pruned, {num_zeros:,} of the model are zero"
        self.job.say(f"wrote {saved.folder}: {counts}\n\n{sidecar['report.txt']}")


def finished_with(settings: Settings, job: Job) -> bool:
    """Whether OUT is there already, made with these settings. Collective.

    Raises:
        ValueError: it is there, and of something else; on every rank.
    """
    if not job.of_rank_0(settings.output.exists):
        return False
    report = job.of_rank_0(lambda: read_json(settings.output / "distprune" / REPORT))
    if (report or {}).get("settings") != settings.facts():
        raise ValueError(
            f"{settings.output} exists, and is not the result of these settings; expected a folder "
            "that does not exist."
        )
    return True
