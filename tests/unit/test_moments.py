"""Fisher and Taylor in one process, without process groups: formulas by hand, and what is meant."""

import pytest
import torch
from torch import nn

from distprune.criteria import Fisher, Taylor


class Scaled(nn.Module):
    """The loss is the sum of weight * x: its gradient is x."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x):
        return (self.weight * torch.tensor(x)).sum()


def scores_of(criterion, module, batches):
    with criterion.calibrating():
        for weight, x in batches:
            with criterion.batch(weight=weight):
                module(x).backward()
    (scores,) = criterion.scores().values()
    return scores.tolist()


BATCHES = [(1, [1.0, -2.0, 0.0]), (3, [3.0, 2.0, 0.0])]  # E[g^2] = [7, 4, 0]; E[|g|] = [2.5, 2, 0]


def test_weights_that_change_are_read_with_the_scores():
    module = Scaled([2.0, -1.0, 5.0])
    criterion = Taylor([(module, "weight")], unit="rank_batch")
    scores_of(criterion, module, BATCHES)
    with torch.no_grad():
        module.weight.fill_(1.0)
    (scores,) = criterion.scores().values()
    assert scores.tolist() == [7.0, 4.0, 0.0]


def test_sparse_gradients_count_rows_that_occur_twice_once():
    dense, sparse = nn.Embedding(5, 2), nn.Embedding(5, 2, sparse=True)
    sparse.weight.data.copy_(dense.weight)
    tokens, found = torch.tensor([1, 3, 1]), []
    for module in (dense, sparse):
        criterion = Fisher([(module, "weight")], unit="rank_batch")
        with criterion.calibrating(), criterion.batch():
            module(tokens).square().sum().backward()
        found.append(*criterion.scores().values())
    assert torch.equal(*found) and bool(found[0][1].gt(0).all())


def test_weights_that_are_all_zero():
    module = Scaled([1.0])
    criterion = Fisher([(module, "weight")], unit="rank_batch")
    with criterion.calibrating(), criterion.batch(weight=0):
        module([2.0]).backward()
    with pytest.raises(ValueError, match=r"Scaled\.weight.*weights of all its batches are 0"):
        criterion.scores()


def test_a_state_of_another_moment_is_refused():
    module = Scaled([1.0])
    pairs = [(module, "weight")]
    criterion = Taylor(pairs, unit="rank_batch", power=1)
    scores_of(criterion, module, [(1, [2.0])])
    with pytest.raises(ValueError, match=r"E\[\|g\|\^1\]"):
        Taylor(pairs, unit="rank_batch", power=2).load_state_dict(criterion.state_dict())
    other = Taylor(pairs, unit="rank_batch", power=1)
    other.load_state_dict(criterion.state_dict())
    assert other.scores()[pairs[0]].tolist() == [2.0]
