"""Sequential pruning on one process: what it takes, and what it refuses."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.statistics import ActivationStatistics, prune_sequentially


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = x + layer(x)
        return x


def sequential(model, batches, blocks=None, prune_block=len, **options):
    statistics = ActivationStatistics(prune.select(model))
    blocks = model.layers if blocks is None else blocks
    return statistics, prune_sequentially(
        statistics, model, blocks, batches, prune_block, **options
    )


@pytest.mark.parametrize("criterion", ["wanda", "ria", "stade"])
def test_scores_of_one_block_need_no_other_block(criterion):
    torch.manual_seed(0)
    model = Decoder()
    statistics = ActivationStatistics(prune.select(model))

    def prune_block(parameters):
        scores = getattr(statistics, criterion)(parameters)
        assert [pair.fqn for pair in scores] == [pair.fqn for pair in parameters]
        return prune.global_unstructured(parameters, prune.L1Unstructured, scores, amount=0.25)

    reports = prune_sequentially(statistics, model, model.layers, [torch.randn(5, 4)], prune_block)
    assert [report.num_pruned for report in reports] == [4, 4, 4]


def test_batches_may_be_tensors_tuples_or_mappings_with_a_mask():
    model, x = Decoder(), torch.ones(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batches = [x, (x,), {"x": x, "attention_mask": mask}, {"x": x, "attention_mask": None}]
    statistics, results = sequential(model, batches)
    assert results == [1, 1, 1]
    assert statistics.num_tokens() == {f"layers.{i}.0.weight": 3 * 6 + 3 for i in range(3)}
    statistics, _ = sequential(model, [x], forward=lambda batch: model(batch[:1]))
    assert set(statistics.num_tokens().values()) == {3}


def test_statistics_of_one_pass_do_not_mix_with_sequential_ones():
    model, x = Decoder(), torch.ones(2, 4)
    statistics, _ = sequential(model, [x])
    for call in (
        lambda: prune_sequentially(statistics, model, model.layers, [x], len),
        lambda: statistics.collecting().__enter__(),
    ):
        with pytest.raises(RuntimeError, match=r"sequential|collected already"):
            call()
    one_pass = ActivationStatistics(prune.select(model))
    with one_pass.collecting():
        model(x)
    assert one_pass.mode == "one_pass"
    with pytest.raises(RuntimeError, match="collected already"):
        prune_sequentially(one_pass, model, model.layers, [x], len)


def test_mistakes_are_named_before_anything_runs():
    model, x = Decoder(), torch.ones(2, 4)
    with pytest.raises(TypeError, match="batches is a generator"):
        sequential(model, (batch for batch in [x]))
    with pytest.raises(ValueError, match=r"layers\.2\.0\.weight is in no block"):
        sequential(model, [x], model.layers[:2])
    with pytest.raises(ValueError, match=r"layers\.0\.0\.weight is in blocks \[0, 3\]"):
        sequential(model, [x], [*model.layers, model.layers[0]])


def test_an_error_leaves_no_hooks():
    model, x = Decoder(), torch.ones(2, 4)
    with pytest.raises(ZeroDivisionError):
        sequential(model, [x], prune_block=lambda parameters: 1 // 0)
    assert not any(module._forward_pre_hooks for module in model.modules())
