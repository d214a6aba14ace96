"""Prune a language model on any number of ranks: from a folder on disk to a pruned one.

    torchrun --standalone --nproc-per-node 8 launch/prune_language_model.py MODEL OUT \
        --criterion wanda --sparsity 0.6 --calibrate text.txt --evaluate held_out.txt

MODEL is a Hugging Face folder with safetensors. Each rank loads its part only; text goes through
the model to learn which weights matter; one call prunes them, exactly, the same on any sharding;
perplexity is measured before and after; `--recover` fine-tunes with the zeros held, all weights or
`--lora` adapters that are merged. OUT is a Hugging Face folder that plain transformers loads, with
the report, the statistics and a picture in OUT/distprune.

Also under `accelerate launch`, and as `python launch/prune_language_model.py --wrap none` on one
device. A run that was killed goes on when it is started again, and ends with the same weights.
"""

from __future__ import annotations

from jobs.processes import join, leave
from language_model.run import Run, finished_with
from language_model.settings import parse_settings


def main() -> None:
    settings = parse_settings()
    job = join()
    if finished_with(settings, job):
        job.say(f"{settings.output} is there already, made with these settings")
    else:
        Run(settings, job).run()
    leave(job, failed=False)


if __name__ == "__main__":
    main()
