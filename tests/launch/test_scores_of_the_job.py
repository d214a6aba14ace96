"""What the main job's criteria learn from a batch does not depend on the ranks that share it."""

import sys

import pytest
import torch
from shell import ROOT
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune.testing import run_ranks

sys.path.insert(0, str(ROOT / "launch"))

CRITERIA = ("snip", "taylor", "fisher", "wanda", "ria", "stade")


def scores_of(wrap: str) -> dict[str, torch.Tensor]:
    """By criterion and parameter: whole scores, or whole factors of scores."""
    from jobs.processes import Job
    from tiny_llama.data import load_corpus
    from tiny_llama.model import build_model, wrap_model
    from tiny_llama.scoring import CRITERIA as FUNCTIONS
    from tiny_llama.scoring import Calibration, TrainingScores
    from tiny_llama.training import Trainer

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    job = Job(rank, size, torch.device("cpu"), 0.0)
    model = wrap_model(build_model(), wrap, job.device, size)
    training = TrainingScores.of(prune.select(model))
    trainer = Trainer.for_wrap(wrap, load_corpus(60), job)
    calibration = Calibration(model, training, trainer, num_batches=1, seed=0)
    found = {}
    for name in CRITERIA:
        scores = FUNCTIONS[name](calibration).scores
        for pair in training.parameters:
            score = scores[pair]
            if isinstance(score, prune.FactoredScores):
                for i, term in enumerate(score.terms):
                    found |= {f"{name}/{pair.fqn}/{i}/{j}": part for j, part in enumerate(term)}
            else:
                whole = score.full_tensor() if isinstance(score, DTensor) else score
                found[f"{name}/{pair.fqn}"] = whole
    return found


@pytest.mark.thorough
@pytest.mark.slow
def test_scores_do_not_depend_on_the_ranks():
    alone = run_ranks(scores_of, 1, "ddp")[0]
    assert len(alone) == 28 * (3 + 1 + 3 + 1)  # tensors, and factors of wanda, ria and stade
    for wrap, num_ranks in (("fsdp2", 2), ("ddp", 3), ("tp", 2)):
        for found in run_ranks(scores_of, num_ranks, wrap):
            assert found.keys() == alone.keys()
            for name, expected in alone.items():
                difference = (found[name] - expected).abs().max()
                assert difference <= 1e-5 * expected.abs().max(), (wrap, name)
