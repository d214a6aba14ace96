"""Train a small Llama on sharded weights, prune it in steps, and prove what was done.

    torchrun --standalone --nproc-per-node 2 launch/prune_tiny_llama.py --wrap fsdp2

Bytes of the Python standard library are the text. The model is pruned globally by
magnitude and, for comparison, at random, with fine-tuning after each step. Then a single
process repeats every pruning and each rank compares its masks bit for bit; the pruned
model is saved and loaded again by plain transformers. The exit status is 1 when a single
mask element differs, or when the saved model has other zeros than reported.
"""

from __future__ import annotations

import time

import torch

from tiny_llama.data import load_corpus
from tiny_llama.figures import draw_layers, draw_loss
from tiny_llama.mask_check import compare_with_single_process
from tiny_llama.model import build_model, consolidated_state, wrap_model
from tiny_llama.processes import join, leave
from tiny_llama.pruning import prune_in_steps, remove_masks, train_on
from tiny_llama.results import Results, loss_table, mask_table, write_results
from tiny_llama.saving import count_kept_zeros, find_faults, save_model
from tiny_llama.settings import parse_settings
from tiny_llama.training import LEARNING_RATE, Trainer, make_optimizer


def main() -> None:
    settings = parse_settings()
    output = settings.output
    scratch = output / "single_process"  # what the single process reads and writes
    scratch.mkdir(parents=True, exist_ok=True)
    job = join()
    job.say(f"{job.num_ranks} ranks on {job.device.type}, {settings.wrap}; losses in nats per byte")

    # Train one dense model.
    trainer = Trainer.for_wrap(settings.wrap, load_corpus(), job)
    torch.manual_seed(settings.seed)  # the same first weights on every rank
    model = wrap_model(build_model(), settings.wrap, job.device, job.num_ranks)
    optimizer = make_optimizer(model, LEARNING_RATE)
    trainer.train(model, optimizer, steps=settings.steps, seed=settings.seed, label="training")
    loss_dense = trainer.held_out_loss(model)
    job.say(f"dense: held-out loss {loss_dense:.3f}")
    trained = consolidated_state(model)

    # Prune copies of it, by magnitude and at random; the dense model trains on for comparison.
    pruned_model, by_magnitude = prune_in_steps(trained, "magnitude", settings, trainer, scratch)
    _, at_random = prune_in_steps(trained, "random", settings, trainer, scratch)
    losses_trained_on = train_on(trained, settings, trainer)
    job.say(f"the last pruning by magnitude\n\n{by_magnitude[-1].report}\n")

    # Make the zeros permanent, and save for people who do not have distprune.
    num_kept_zeros = count_kept_zeros(pruned_model)
    remove_masks(pruned_model, settings)
    loss_saved = trainer.held_out_loss(pruned_model)
    save_model(pruned_model, output / "model", job)

    # Check the masks against a single process, and the saved file against the report.
    job.say("a single process repeats every pruning")
    steps = by_magnitude + at_random
    comparisons = compare_with_single_process(steps, settings, job, scratch)
    faults = []
    if job.rank == 0:
        faults = find_faults(output / "model", by_magnitude[-1].report, loss_saved, num_kept_zeros)

    seconds = time.monotonic() - job.started
    results = Results(loss_dense, losses_trained_on, steps, comparisons, faults, seconds)
    if job.rank == 0:
        draw_loss(results, output / "loss_over_sparsity.png")
        draw_layers(results, output / "sparsity_per_layer.png")
        write_results(results, trainer.corpus, settings, job)
    job.say(f"held-out loss, nats per byte\n\n{loss_table(results)}\n\n{mask_table(results)}\n")
    job.say(f"saved model: {'; '.join(faults) or 'as reported'}; results in {output}")
    if results.failed:
        job.say(f"FAILED: {results.num_differing} mask elements differ; faults: {faults}")
    leave(job, failed=results.failed)


if __name__ == "__main__":
    main()
