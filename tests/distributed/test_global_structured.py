"""global_structured prunes on every wrapping the channels that one process prunes."""

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong_on, changes, snapshot, wrong_masks
from helpers.models import Net, fill, target
from helpers.sampling import every

# Name, dimension, indices per channel, whether it is ranked.
GROUPS = {
    "hidden": [("l1.weight", 0, 2, True), ("l1.bias", 0, 2, False), ("l2.weight", 1, 2, True)],
    "last": [("l3.weight", -1, 1, True)],
    "bias": [("l2.bias", 0, 1, True)],
}


def made_groups(model) -> list[prune.ChannelGroup]:
    inner = wrappings.unwrapped(model)
    return [
        prune.ChannelGroup(
            [
                prune.ChannelPart(prune.NamedParameter(*target(inner, name), name), dim, size, rank)
                for name, dim, size, rank in parts
            ],
            group,
        )
        for group, parts in GROUPS.items()
    ]


def channel(tensor, dim, size, c):
    """A view of the slices of one channel."""
    return tensor.narrow(dim, c * size, size)


def oracle(scores, keeps, amount, n, normalize=None):
    """Pruned channels of each group after a loop over whole tensors, and the largest norm of them.

    Args:
        scores, keeps: by name; the masks are changed.
    """
    ranked = []
    for position, (group, parts) in enumerate(GROUPS.items()):
        num_channels = scores[parts[0][0]].shape[parts[0][1]] // parts[0][2]
        norms = {}
        for c in range(num_channels):
            left = sum(
                int(channel(keeps[name], dim, size, c).sum()) for name, dim, size, _ in parts
            )
            if not left:
                continue
            terms = torch.cat([
                channel(scores[name].double() * keeps[name], dim, size, c).flatten()
                for name, dim, size, is_ranked in parts
                if is_ranked
            ])  # fmt: skip
            norms[c] = float(torch.linalg.vector_norm(terms, n))
        values = torch.tensor(list(norms.values()), dtype=torch.float64)
        divisor = float(values.square().mean().sqrt()) if normalize == "rms" else 1.0
        ranked += [(norm / (divisor or 1.0), position, c, group) for c, norm in norms.items()]
    budget = amount if isinstance(amount, int) else round(amount * len(ranked))
    pruned = dict.fromkeys(GROUPS, 0)
    threshold = None
    for score, _, c, group in sorted(ranked):
        budget -= 1
        if budget < 0:
            break
        pruned[group] += 1
        threshold = score
        for name, dim, size, _ in GROUPS[group]:
            channel(keeps[name], dim, size, c).fill_(False)
    return pruned, threshold


CASES = [
    {"data": "few", "dtype": "float32", "n": 2},
    {"data": "normal", "dtype": "float32", "n": 2, "normalize": "rms"},
    {"data": "equal", "dtype": "bfloat16", "n": 1},
    {"data": "normal", "dtype": "float32", "n": 1},
    {"data": "few", "dtype": "float16", "n": 2},
    {"data": "rounded", "dtype": "float32", "n": float("inf")},
    {"data": "normal", "dtype": "float64", "n": 2},
    {"data": "rounded", "dtype": "float32", "n": 1, "scores": "tensors"},
    {"data": "few", "dtype": "float32", "n": 1, "scores": "factors"},
]


def differences(wrapping: str, case: dict) -> list[str]:
    """Two calls, with elements pruned one by one between them."""
    case = dict(case)
    dense = fill(Net(wrappings.runnable_sizes(wrapping)), case.pop("data"), case.pop("dtype"))
    of_scores = case.pop("scores", None)
    whole = {name: p.detach().clone() for name, p in dense.named_parameters()}
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(dense, wrapping)
    groups = made_groups(model)
    ranked = [part for group in groups for part in group.parts if part.is_ranked]
    given = None
    if of_scores == "tensors":
        generator = torch.Generator().manual_seed(1)
        whole = {
            name: torch.randint(-4, 5, p.shape, generator=generator).float()
            for name, p in whole.items()
        }
        given = {part.parameter: whole[part.label] for part in ranked}
    elif of_scores == "factors":
        given = {}
        for part in ranked:
            shape = whole[part.label].shape
            factor = torch.arange(1.0, shape[-1] + 1).view([1] * (len(shape) - 1) + [-1])
            given[part.parameter] = prune.FactoredScores([[factor]])
            whole[part.label] = whole[part.label] * factor
    keeps = {name: torch.ones(p.shape, dtype=torch.bool) for name, p in whole.items()}
    names = [part.label for group in groups for part in group.parts]
    wrong = []
    for call, amount in enumerate((0.3, 2)):
        report = prune.global_structured(groups, amount=amount, importance_scores=given, **case)
        expected, top = oracle(whole, keeps, amount, case["n"], case.get("normalize"))
        wrong += wrong_masks(model, {name: keeps[name] for name in names}, indices, f"call {call}")
        found = {group.name: group.num_pruned_now for group in report.groups}
        if found != expected:
            wrong.append(f"call {call}: {found} is not {expected}")
        # Exact but for the rounding of the oracle's own sums.
        if report.threshold != pytest.approx(top, rel=1e-12):
            wrong.append(f"call {call}: the threshold {report.threshold} is not {top}")
        counts = {entry.name: entry.num_pruned for entry in report.parameters}
        if counts != {name: int((~keeps[name]).sum()) for name in names}:
            wrong.append(f"call {call}: {counts}")
        if not prune.verify(model).ok:
            wrong.append(f"call {call}: {prune.verify(model)}")
        if call == 0:
            generator = torch.Generator().manual_seed(5)
            some = [torch.rand(whole[n].shape, generator=generator) < 0.7 for n in names]
            pairs = [part.parameter for group in groups for part in group.parts]
            masks = [keeps[n] & mask for n, mask in zip(names, some, strict=True)]
            prune.set_masks(pairs, masks)
            keeps.update(zip(names, masks, strict=True))
    return wrong


WRAPPINGS = wrappings.sampled(wrappings.ALL + wrappings.FSDP2_DIM1)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_any_wrapping(wrapping):
    # Another sample on each wrapping, so that every case runs on several.
    for case in every(5, CASES, WRAPPINGS.index(wrapping)):
        assert_nothing_wrong_on(wrapping, differences, case)


def traffic(size: int) -> int:
    model = wrappings.wrap(fill(Net((size, size, size, 4)), "normal", "float32"), "fsdp2-2")
    groups = [
        prune.ChannelGroup([prune.ChannelPart((model.l1, "weight"), 0)], "first"),
        prune.ChannelGroup([prune.ChannelPart((model.l2, "weight"), 1)], "second"),
    ]
    return prune.global_structured(groups, amount=0.5).bytes_sent


def test_bytes_are_per_channel():
    small, other = run_ranks(traffic, 2, 16)
    large, _ = run_ranks(traffic, 2, 64)
    assert small == other
    assert large - small == 16 * 2 * (64 - 16)  # 16 bytes for each channel of two groups


def error_of(what: str) -> tuple[str, str, list[str]]:
    """What a call with a mistake raises on this rank, and what it changed."""
    rank = dist.get_rank()
    model = wrappings.wrap(fill(Net((4, 4, 4, 4)), "normal", "float32"), "fsdp2-2")
    weight = prune.NamedParameter(model.l1, "weight", "l1.weight")
    groups = [prune.ChannelGroup([prune.ChannelPart(weight, 0)], "g")]
    arguments: dict = {"amount": 0.5}
    match what:
        case "amount":
            arguments["amount"] = 0.5 if rank else 0.25
        case "dim":
            groups = [prune.ChannelGroup([prune.ChannelPart(weight, rank)], "g")]
        case "scores of one rank":
            arguments["importance_scores"] = {weight: torch.ones(4, 4 + rank)}
        case "nan":
            scores = torch.ones(4, 4)
            scores[2, 1] = torch.nan
            arguments["importance_scores"] = {weight: scores}
    before = snapshot(model)
    with Traffic():
        try:
            prune.global_structured(groups, **arguments)
            error = ("nothing", "")
        except Exception as raised:
            error = (type(raised).__name__, str(raised))
    return *error, changes(before, snapshot(model))


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("amount", "ValueError", "amount"),
        ("dim", "ValueError", "l1.weight"),
        ("scores of one rank", "ValueError", "l1.weight"),
        ("nan", "ValueError", "g, channels 2 are nan"),
    ],
)
def test_errors_are_on_all_ranks(what, kind, text):
    for found, message, changed in run_ranks(error_of, 2, what):
        assert found == kind and text in message, (found, message)
        assert changed == []
