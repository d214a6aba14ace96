"""Compare criteria and scopes on a language model: perplexity before and after a short recovery.

    torchrun --standalone --nproc-per-node 2 launch/compare_on_language_model.py MODEL OUT \
        --calibrate train.txt --evaluate held_out.txt --recover train.txt --recovery-steps 50

Each cell prunes the same model in one shot, by scores that were learnt from the dense one. It is a
file of its own, so a run that was killed goes on where it stopped, and criteria, scopes and
sparsities may be added later. `results.md`, `results.json` and `perplexity.png` show all cells that
are there.
"""

from __future__ import annotations

from jobs.processes import join, leave
from language_model.table import open_table
from language_model.table_results import write_results
from language_model.table_settings import parse_settings


def main() -> None:
    settings = parse_settings()
    job = join()
    open_table(settings, job).fill()
    if job.rank == 0:
        write_results(settings.output, job)
    job.say(f"results in {settings.output}")
    leave(job, failed=False)


if __name__ == "__main__":
    main()
