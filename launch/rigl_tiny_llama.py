"""Train a small Llama with 90 % of its weights pruned from the first step: by RigL, and not moved.

    torchrun --standalone --nproc-per-node 2 launch/rigl_tiny_llama.py --wrap fsdp2

The model and the text are those of prune_tiny_llama.py. Both trainings begin with the same random
masks. One keeps them; in the other, RigL drops and grows elements every few steps, over all ranks.
The exit status is 1 if that does not lead to a lower loss, or to another number of weights.
"""

from __future__ import annotations

import argparse
import contextlib

import torch

import distprune as prune
from distprune import dynamic
from jobs.processes import join, leave
from tiny_llama.data import HELD_OUT_WINDOWS, load_corpus
from tiny_llama.model import build_model, wrap_model
from tiny_llama.training import LEARNING_RATE, Trainer, make_optimizer


class RigL:
    """Updates masks inside of every few steps of an optimizer.

    The backward before such a step runs inside of ``dense_gradients``. The step itself then trains
    what has grown, too.
    """

    def __init__(self, model, pairs, optimizer, *, every: int, steps: int) -> None:
        self.model, self.pairs, self.optimizer = model, pairs, optimizer
        self.every, self.last_step = every, steps * 3 // 4
        self.num_steps, self.num_grown = 0, 0
        self.dense = contextlib.ExitStack()
        self.is_due = False
        optimizer.register_step_pre_hook(lambda *_: self.update())

    def update(self) -> None:
        if self.is_due:
            fraction = dynamic.cosine_fraction(self.num_steps, self.last_step)
            report = dynamic.rigl_step(self.pairs, fraction, optimizer=self.optimizer)
            self.num_grown += report.num_grown
            self.dense.close()

    def after_step(self, step: int) -> None:
        self.num_steps = step + 1
        next_number = self.num_steps + 1
        self.is_due = next_number % self.every == 0 and next_number < self.last_step
        if self.is_due:
            self.dense.enter_context(prune.dense_gradients(self.model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--wrap", default="fsdp2", choices=["ddp", "fsdp2", "tp"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="steps between two updates")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    job = join()
    trainer = Trainer.for_wrap(settings.wrap, load_corpus(HELD_OUT_WINDOWS), job)
    losses, counts = {}, {}
    for method in ("static", "RigL"):
        torch.manual_seed(settings.seed)  # the same first weights and masks, on every rank
        model = wrap_model(build_model(), settings.wrap, job.device, job.num_ranks)
        pairs = prune.select(model)
        prune.global_unstructured(pairs, prune.RandomUnstructured, amount=settings.sparsity)
        optimizer = make_optimizer(model, LEARNING_RATE)
        rigl = None
        if method == "RigL":
            rigl = RigL(model, pairs, optimizer, every=settings.every, steps=settings.steps)
        trainer.train(
            model,
            optimizer,
            steps=settings.steps,
            seed=settings.seed,
            label=method,
            after_step=None if rigl is None else rigl.after_step,
        )
        losses[method] = trainer.held_out_loss(model)
        counts[method] = prune.verify(model).num_pruned
        grown = "" if rigl is None else f", {rigl.num_grown:,} have grown"
        job.say(f"{method}: {counts[method]:,} pruned{grown}, held-out loss {losses[method]:.3f}")
    is_right = losses["RigL"] < losses["static"] and len(set(counts.values())) == 1
    leave(job, failed=not is_right)


if __name__ == "__main__":
    main()
