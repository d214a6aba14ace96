"""Train a small Llama on sharded weights, prune it in steps, and prove what was done.

    torchrun --standalone --nproc-per-node 2 launch/prune_tiny_llama.py --wrap fsdp2

Bytes of the Python standard library are the text. The model is pruned globally by
magnitude and, for comparison, at random, with fine-tuning after each step. Then a single
process repeats every pruning and each rank compares its masks bit for bit; the pruned
model is saved and loaded again by plain transformers. The exit status is 1 when a single
mask element differs, or when the saved model has other zeros than reported.

With `--schedule cubic` the model is pruned gradually while it is trained instead, and a run
that was killed goes on from its last checkpoint when it is started again.

With `--criterion magnitude snip ...` it makes a table instead: held-out loss by criterion, scope
and sparsity. Each cell is a pruning of the same trained model, and is checked in the same way.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from jobs.processes import join, leave
from tiny_llama.comparison import compare_criteria
from tiny_llama.comparison_results import (
    ComparisonResults,
    comparison_tables,
    mask_sentence,
    write_comparison,
)
from tiny_llama.data import load_corpus
from tiny_llama.figures import draw_comparison, draw_layers, draw_loss
from tiny_llama.gradual import prune_while_training
from tiny_llama.mask_check import compare_with_single_process, count_differing_of_cells
from tiny_llama.pruning import prune_in_rounds, remove_masks
from tiny_llama.results import Results, loss_table, mask_table, write_results
from tiny_llama.saving import count_kept_zeros, find_faults, save_model
from tiny_llama.settings import Settings, parse_settings
from tiny_llama.training import Trainer


def main() -> None:
    settings = parse_settings()
    scratch = settings.output / "single_process"  # what the single process reads and writes
    scratch.mkdir(parents=True, exist_ok=True)
    job = join()
    job.say(f"{job.num_ranks} ranks on {job.device.type}, {settings.wrap}; losses in nats per byte")
    trainer = Trainer.for_wrap(settings.wrap, load_corpus(settings.held_out_windows), job)
    run = compare if settings.criteria else prune_and_save
    leave(job, failed=run(settings, trainer, scratch))


def prune_and_save(settings: Settings, trainer: Trainer, scratch: Path) -> bool:
    """Prune by magnitude and at random, save the model, check both; True if a check failed."""
    job, output = trainer.job, settings.output
    prune_model = prune_in_rounds if settings.schedule == "rounds" else prune_while_training
    outcome = prune_model(settings, trainer, scratch)
    pruned_model, steps = outcome.model, outcome.steps
    last_report = [step for step in steps if step.method == "magnitude"][-1].report
    job.say(f"the last pruning by magnitude\n\n{last_report}\n")

    # Make the zeros permanent, and save for people who do not have distprune.
    num_kept_zeros = count_kept_zeros(pruned_model)
    remove_masks(pruned_model, settings)
    loss_saved = trainer.held_out_loss(pruned_model)
    save_model(pruned_model, output / "model", job)

    # Check the masks against a single process, and the saved file against the report.
    job.say("a single process repeats every pruning")
    comparisons = compare_with_single_process(steps, settings, job, scratch)
    faults = []
    if job.rank == 0:
        promised = last_report, loss_saved, num_kept_zeros
        faults = find_faults(output / "model", *promised, settings.held_out_windows)

    seconds = time.monotonic() - job.started
    losses = outcome.loss_dense, outcome.losses_trained_on
    results = Results(*losses, steps, comparisons, faults, seconds)
    if job.rank == 0:
        draw_loss(results, output / "loss_over_sparsity.png")
        draw_layers(results, output / "sparsity_per_layer.png")
        write_results(results, trainer.corpus, settings, job)
    job.say(f"held-out loss, nats per byte\n\n{loss_table(results)}\n\n{mask_table(results)}\n")
    job.say(f"saved model: {'; '.join(faults) or 'as reported'}; results in {output}")
    if results.failed:
        job.say(f"FAILED: {results.num_differing} mask elements differ; faults: {faults}")
    elif settings.schedule != "rounds" and job.rank == 0:  # the next run starts afresh
        shutil.rmtree(settings.checkpoints, ignore_errors=True)
    return results.failed


def compare(settings: Settings, trainer: Trainer, scratch: Path) -> bool:
    """Prune by each of --criterion over each of --scope; True if a mask differs."""
    job = trainer.job
    comparison = compare_criteria(settings, trainer, scratch)
    job.say(f"a single process repeats {len(comparison.cells)} prunings")
    counts = count_differing_of_cells(comparison.cells, settings, job, scratch)
    results = ComparisonResults(comparison, *counts, time.monotonic() - job.started)
    if job.rank == 0:
        draw_comparison(comparison, settings, settings.output / "loss_by_criterion.png")
        write_comparison(results, trainer.corpus, settings, job)
    job.say(f"{comparison_tables(results, settings)}\n")
    job.say(f"{mask_sentence(results)}; results in {settings.output}")
    return results.num_differing > 0


if __name__ == "__main__":
    main()
