"""OWL from activation statistics: ratios, counts and masks of one process with all batches."""

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune import budgets
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on, wrong_masks
from helpers.models import EVEN_HIDDEN, Net

NAMES = ["l1.weight", "l2.weight", "l3.weight"]


def integer_net():
    """Small integers, so that all sums of inputs are exact; some columns are large."""
    model = Net(EVEN_HIDDEN)
    model.forward = lambda x: model.l3(model.l2(model.l1(x)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            values = torch.randint(-3, 4, parameter.shape, generator=generator)
            values.view(-1)[:: 3 + 4 * position] *= 9
            parameter.copy_(values)
    return model


def batch_of(rank):
    return torch.randint(-2, 3, (4, 6), generator=torch.Generator().manual_seed(rank)).float()


def pruned(model, batches, group=None):
    """Prune by Wanda's scores with OWL's budget; the outlier ratios, and the counts."""
    targets = prune.select(wrappings.unwrapped(model), names=("weight",))
    statistics = prune.statistics.ActivationStatistics(targets, group=group)
    with statistics.collecting(), torch.no_grad():
        for inputs in batches:
            model(inputs)
    ratios = statistics.outlier_ratios(threshold_multiple=2)
    report = prune.global_unstructured(
        targets,
        prune.L1Unstructured,
        statistics.wanda(),
        amount=budgets.owl(
            targets,
            0.5,
            statistics.outlier_ratios(threshold_multiple=2, per="parameter"),
            lam=0.2,
        ),
        group=group,
    )
    return list(ratios.values()), [entry.num_pruned for entry in report.parameters]


def differences(wrapping: str) -> list[str]:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    part, num_parts = wrappings.data_rank(wrapping)
    dense = integer_net()
    indices = wrappings.local_indices(dense, wrapping)
    expected = pruned(dense, [batch_of(rank) for rank in range(num_parts)], alone)
    keeps = {name: dense.get_buffer(name + "_mask").clone() for name in NAMES}
    model = wrappings.wrap(integer_net(), wrapping)
    found = pruned(model, [batch_of(part)])
    wrong = [] if found == expected else [f"{found}, not {expected}"]
    _, counts = found
    if len({count / keep.numel() for count, keep in zip(counts, keeps.values(), strict=True)}) < 2:
        wrong.append(f"OWL gave every parameter the same sparsity: {counts}")
    dist.destroy_process_group(alone)
    return wrong + wrong_masks(model, keeps, indices)


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-3", "fsdp2-3", "tp-2", "fsdp2_tp-2x2"])
def test_ratios_counts_and_masks(wrapping):
    assert_nothing_wrong_on(wrapping, differences)
