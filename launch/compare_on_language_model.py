"""Compare criteria and scopes on a language model: perplexity before and after a short recovery.

    torchrun --standalone --nproc-per-node 2 launch/compare_on_language_model.py MODEL OUT \
        --calibrate train.txt --evaluate held_out.txt --recover train.txt --recovery-steps 50

Each cell prunes the same model in one shot, by scores that were learnt from the dense one. It is a
file of its own, so a run that was killed goes on where it stopped, and criteria, scopes and
sparsities may be added later. `results.md`, `results.json` and `perplexity.png` show all cells that
are there.
"""

from __future__ import annotations

import torch

from distprune import language_models
from jobs.processes import join, leave
from jobs.work import Folder
from language_model.table import Table, Texts
from language_model.table_results import write_results
from language_model.table_settings import parse_settings


def main() -> None:
    settings = parse_settings()
    job = join()
    folder = Folder(settings.output, settings.facts(recovered=False), job)
    recovered = None
    if settings.recover:
        path = settings.output / "recovered"
        recovered = Folder(path, settings.facts(recovered=True), job)
    tokenizer = language_models.load_tokenizer(settings.model)
    read, length = language_models.read_windows, settings.length
    texts = Texts(
        read(tokenizer, settings.calibrate, length).sample(settings.windows, seed=settings.seed),
        read(tokenizer, settings.evaluate, length, limit=settings.evaluation_windows),
        read(tokenizer, settings.recover, length) if settings.recover else None,
    )
    model = language_models.load_sharded(
        settings.model, wrap=settings.wrap, dtype=torch.float32, device=job.device
    )
    model.eval()
    job.say(f"loaded {settings.model}; {job.num_ranks} ranks, {settings.wrap}")
    Table(settings, model, texts, folder, recovered, job).fill()
    if job.rank == 0:
        write_results(settings.output, job)
    job.say(f"results in {settings.output}")
    leave(job, failed=False)


if __name__ == "__main__":
    main()
