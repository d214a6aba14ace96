"""The job's numbers: for people in `results.md`, for programs in `results.json`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from jobs.document import command_line, machine_facts, markdown_table
from jobs.processes import Job

from .data import BATCH, WINDOW, Corpus
from .mask_check import MaskComparison
from .pruning import PruningStep
from .settings import Settings


@dataclass(frozen=True, slots=True)
class Results:
    """All results of the job."""

    loss_dense: float  # held-out nats/byte before any pruning
    losses_trained_on: list[float]  # of the dense model after each round of further steps
    steps: list[PruningStep]
    comparisons: list[MaskComparison]
    faults: list[str]  # of the saved model
    seconds: float

    @property
    def num_differing(self) -> int:
        return sum(comparison.num_differing for comparison in self.comparisons)

    @property
    def failed(self) -> bool:
        return self.num_differing > 0 or bool(self.faults)

    def of(self, method: str) -> list[PruningStep]:
        return [step for step in self.steps if step.method == method]


def loss_table(results: Results) -> str:
    """Held-out loss by sparsity and method, as a Markdown table."""
    rows = [
        ("sparsity", "pruned elements", "magnitude, after pruning", "magnitude, after fine-tuning",
         "random, after pruning", "random, after fine-tuning", "dense, as many steps"),
        ("0 %", "0", *[f"{results.loss_dense:.3f}"] * 5),
    ]  # fmt: skip
    columns = results.of("magnitude"), results.of("random"), results.losses_trained_on
    for magnitude, random, dense in zip(*columns, strict=True):
        losses = [
            loss for step in (magnitude, random) for loss in (step.loss_pruned, step.loss_finetuned)
        ]
        numbers = [f"{loss:.3f}" for loss in (*losses, dense)]
        rows.append((f"{magnitude.percent} %", f"{magnitude.report.num_pruned:,}", *numbers))
    return markdown_table(rows)


def mask_table(results: Results) -> str:
    """Differing mask elements per pruning, as a Markdown table."""
    rows = [("pruning", "mask elements compared, all ranks", "differing from the single process")]
    for found in results.comparisons:
        pruning = f"{found.method}, {100 * found.sparsity:g} %"
        rows.append((pruning, f"{found.num_compared:,}", f"{found.num_differing:,}"))
    return markdown_table(rows)


def write_results(results: Results, corpus: Corpus, settings: Settings, job: Job) -> None:
    """Write `results.md`, `results.json` and one report per pruning. For rank 0."""
    folder = settings.output
    (folder / "results.md").write_text(_document(results, corpus, settings, job))

    kept = ("method", "sparsity", "amount", "loss_pruned", "loss_finetuned")
    numbers = {
        "settings": {**asdict(settings), "output": str(settings.output)},
        "num_ranks": job.num_ranks,
        "machine": machine_facts(job),
        "loss_dense": results.loss_dense,
        "losses_trained_on": results.losses_trained_on,
        "steps": [{name: getattr(step, name) for name in kept} for step in results.steps],
        "mask_comparisons": [asdict(comparison) for comparison in results.comparisons],
        "saved_model_faults": results.faults,
        "seconds": results.seconds,
    }
    (folder / "results.json").write_text(json.dumps(numbers, indent=2))

    reports = folder / "reports"
    reports.mkdir(exist_ok=True)
    for step in results.steps:
        (reports / f"{step.key}.json").write_text(step.report.to_json(indent=2))


def _document(results: Results, corpus: Corpus, settings: Settings, job: Job) -> str:
    differing = f"{results.num_differing} MASK ELEMENTS DIFFER"
    masks = differing if results.num_differing else "every mask is the single process's"
    saved = "; ".join(results.faults) or "exactly the reported zeros, and the same loss"
    machine = "\n".join(f"- {what}: {value}" for what, value in machine_facts(job).items())
    return f"""# Pruning a small Llama, `--wrap {settings.wrap}`, {job.num_ranks} ranks

## Held-out loss, nats per byte

{loss_table(results)}

{_how(settings)}
The last column is the dense model after as many steps as the pruned ones had by then: the training
is short, so more of it lowers any loss. Lower is better; a uniform guess over 256 bytes has
{math.log(256):.3f}.

![Held-out loss over sparsity](loss_over_sparsity.png)
![Sparsity of each parameter](sparsity_per_layer.png)

## Masks against a single process

{mask_table(results)}

Result: {masks}. A lone process repeated each pruning on a plain
model with the consolidated weights; every rank compared the masks that it holds bit for bit.
Replicas count once per rank.

## The saved model

`model/` was loaded by plain transformers in a process without distprune: {saved}.

## How it was run

{machine}
- data: Python standard library; {len(corpus.train):,} bytes of {corpus.num_train_files} files for
  training, {corpus.held_out.numel():,} bytes of {corpus.num_held_out_files} other files held out
- training: {settings.steps} steps of {BATCH} x {WINDOW} bytes, seed {settings.seed}
- seconds: {results.seconds:.0f}

```
{command_line(job)}
```
"""


def _how(settings: Settings) -> str:
    if settings.schedule == "rounds":
        return (
            f"Both methods prune the same trained model in steps, with {settings.finetune_steps} "
            'steps of\nfine-tuning on the same batches after each; "after pruning" is measured '
            "before the fine-tuning of\nthat row."
        )
    return (
        f"Both methods prune while a model is trained, by a {settings.schedule} schedule over "
        f"{settings.steps} steps, with\n{settings.finetune_steps} more steps after its end; "
        '"after fine-tuning" is measured before the next pruning, or at the end.'
    )
