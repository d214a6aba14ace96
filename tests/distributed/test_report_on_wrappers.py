"""The report of a pruning: whole-model numbers, equal on every rank and exact."""

import json

import pytest
import torch

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.models import ShapesNet, fill, fqns, target

AMOUNTS = (0.3, 20)
TOTALS = [
    "num_elements",
    "num_pruned",
    "num_pruned_now",
    "sparsity",
    "threshold",
    "num_ties",
    "num_ties_pruned",
]


def reports(wrapping: str) -> list[tuple[dict, dict]]:
    model = wrappings.wrap(fill(ShapesNet(), "few", "float32"), wrapping)
    names = fqns(ShapesNet())
    found = []
    for amount in AMOUNTS:
        report = prune.global_unstructured(
            [target(wrappings.unwrapped(model), name) for name in names],
            prune.L1Unstructured,
            amount=amount,
        )
        entries = [
            (e.num_elements, e.num_pruned_before, e.num_pruned_now, e.num_pruned, e.sparsity)
            for e in report.parameters
        ]
        values = {name: getattr(report, name) for name in TOTALS} | {"entries": entries}
        assert json.loads(report.to_json()) == report.to_dict()
        found.append((values, report.to_dict()))
    return found


def expected_reports() -> list[dict]:
    model = fill(ShapesNet(), "few", "float32")
    scores = [p.detach() for p in model.parameters()]
    keeps = [torch.ones(score.shape).bool() for score in scores]
    expected = []
    for amount in AMOUNTS:
        before, keeps = keeps, reference.prune(scores, amount, keeps)
        now = [old & ~new for old, new in zip(before, keeps, strict=True)]
        pruned_now = [s.abs()[cut].tolist() for s, cut in zip(scores, now, strict=True)]
        entries = [
            (
                old.numel(),
                int((~old).sum()),
                int(cut.sum()),
                int((~new).sum()),
                float((~new).double().mean()),
            )
            for old, cut, new in zip(before, now, keeps, strict=True)
        ]
        num_elements, num_pruned = sum(e[0] for e in entries), sum(e[3] for e in entries)
        cut = max(score for scores in pruned_now for score in scores)
        ties = [s.abs()[old] == cut for s, old in zip(scores, before, strict=True)]
        expected.append(
            {
                "num_elements": num_elements,
                "num_pruned": num_pruned,
                "num_pruned_now": sum(e[2] for e in entries),
                "sparsity": num_pruned / num_elements,
                "threshold": cut,
                "num_ties": sum(int(tie.sum()) for tie in ties),
                "num_ties_pruned": sum(scores.count(cut) for scores in pruned_now),
                "entries": entries,
            }
        )
    return expected


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL))
def test_numbers_are_those_of_the_whole_model(wrapping):
    per_rank = run_ranks(reports, wrappings.world_size(wrapping), wrapping)
    for found in per_rank:
        for (values, _), expected in zip(found, expected_reports(), strict=True):
            assert {key: values[key] for key in expected} == expected
    data = [[{**as_dict, "seconds": 0} for _, as_dict in found] for found in per_rank]
    assert data == [data[0]] * len(data)
