"""Sequential Wanda on every wrapper, against the published algorithm on one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distprune as prune
from distprune.statistics import ActivationStatistics, prune_sequentially
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, wrong_masks
from helpers.integer_nets import integer_net
from helpers.sampling import every

NAMES = ["l1.weight", "l2.weight", "l3.weight"]


def data_of(num_parts: int, num_features: int) -> list[list[Tensor]]:
    """Two batches per part, of other sizes."""
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randint(-1, 2, (1 + part + n, num_features), generator=generator).float()
         for n in (1, 2)]
        for part in range(num_parts)
    ]  # fmt: skip


def published(net: nn.Module, inputs: Tensor, amount: float) -> tuple[list[Tensor], list[Tensor]]:
    """Masks, and mean squares of the inputs: block after block, replaying what the last one gave.

    Collect the inputs of the block while it is dense, prune it, run it again, and go on with what
    it then gives.
    """
    keeps, squares = [], []
    x = inputs.double()
    for name in NAMES:
        layer = net.get_submodule(name.partition(".")[0])
        mean = x.square().mean(0)
        squares.append(mean)
        scores = layer.weight.detach().abs() * mean.sqrt().float()
        (keep,) = reference.prune([scores], amount)
        keeps.append(keep)
        x = torch.relu(x @ (layer.weight * keep).double().T + layer.bias.double())
    return keeps, squares


def differences(wrapping: str) -> list[str]:
    sizes = wrappings.runnable_sizes(wrapping)
    indices = wrappings.local_indices(integer_net(sizes), wrapping)
    model = wrappings.wrap(integer_net(sizes, largest=2), wrapping)
    is_plain = wrappings.kind_of(wrapping) == "plain"
    part, num_parts = (
        (dist.get_rank(), dist.get_world_size()) if is_plain else wrappings.data_rank(wrapping)
    )
    data = data_of(num_parts, sizes[0])
    statistics = ActivationStatistics(prune.select(model))
    seen = []

    def prune_block(parameters):
        seen.append([pair.fqn for pair in parameters])
        scores = statistics.wanda(parameters)
        return prune.global_unstructured(parameters, prune.L1Unstructured, scores, amount=0.4)

    inner = wrappings.unwrapped(model)
    blocks = [inner.l1, inner.l2, inner.l3]
    reports = prune_sequentially(statistics, model, blocks, data[part], prune_block)
    inputs = torch.cat([batch for batches in data for batch in batches])
    keeps, squares = published(integer_net(sizes, largest=2), inputs, 0.4)
    wrong = wrong_masks(model, dict(zip(NAMES, keeps, strict=True)), indices)
    if seen != [[name] for name in NAMES] or len(reports) != 3:
        wrong.append(f"{seen}")
    if statistics.mode != "sequential":
        wrong.append(statistics.mode)
    for totals, mean in zip(statistics.totals().values(), squares, strict=True):
        if not torch.equal(totals.squares / totals.num_tokens, mean):
            wrong.append(f"{totals.squares / totals.num_tokens}, not {mean}")
    return wrong


@pytest.mark.parametrize(
    "wrapping", every(2, wrappings.sampled([*wrappings.ALL, *wrappings.FSDP2_DIM1]))
)
def test_masks_are_those_of_the_published_algorithm(wrapping):
    assert_nothing_wrong_on(wrapping, differences)


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
