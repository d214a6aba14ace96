"""Criteria on every wrapper beside one process: scores, masks, traffic, states, and refusals.

A row is a criterion: a caller's loop with it, and what it is, written from its paper with plain
autograd. Rank batches in other loops and models: test_rank_batches.py; scores of inputs:
test_statistics_on_wrappers.py, and their papers' formulas in unit/test_scores_from_activations.py.
"""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy

import distprune as prune
from distprune import criteria
from distprune.criteria import SNIP, Fisher
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import (
    assembled,
    assert_nothing_wrong,
    assert_nothing_wrong_on,
    raised,
    wrong_masks,
)
from helpers.micro_batches import (
    WEIGHTS,
    Wrapped,
    expected_scores,
    gradients_of_units,
    num_tokens,
    wrong_scores,
)
from helpers.models import fqns
from helpers.sampling import every

AMOUNT = 0.4
NUM_BATCHES = 3
Named = dict[str, Tensor]

# Loops of a caller.


def step_by_step(w: Wrapped) -> None:
    for number in range(NUM_BATCHES):
        w.step(number)
        w.model.zero_grad()


def own_batches(w: Wrapped) -> None:
    for number in range(NUM_BATCHES):
        w.loss(number).backward()
    w.model.zero_grad()


def by_steps(make: Callable, is_weighted: bool = False) -> Callable[[Wrapped], Mapping]:
    """One update after each micro-batch of all ranks."""

    def run(w: Wrapped) -> Mapping:
        criterion = make(w.matrices)
        for number in range(NUM_BATCHES):
            w.step(number)
            tokens = sum(num_tokens(rank, number) for rank in range(w.num_ranks))
            criterion.update(weight=tokens) if is_weighted else criterion.update()
            w.model.zero_grad()
        return criterion.scores()

    return run


def by_rank_batches(make: Callable) -> Callable[[Wrapped], Mapping]:
    def run(w: Wrapped) -> Mapping:
        criterion = make(w.matrices)
        w.calibrate(criterion, NUM_BATCHES)
        return criterion.scores()

    return run


# What one process computes.


def weights_of(w: Wrapped) -> Named:
    return {name: w.dense.get_parameter(name).detach() for name in WEIGHTS}


def sums_of(score: Callable[[Tensor, list[Tensor]], Tensor]) -> Callable[[Wrapped], Named]:
    """A function of a weight and its gradients in all steps."""

    def expected(w: Wrapped) -> Named:
        steps = [gradients for _, gradients in w.steps()]
        return {n: score(weight, [g[n] for g in steps]) for n, weight in weights_of(w).items()}

    return expected


def moments(unit: str, power: int, factor: float) -> Callable[[Wrapped], Named]:
    """1611.06440 and 1906.10771: factor * |w|^p times the mean of |g|^p over units."""

    def expected(w: Wrapped) -> Named:
        units = w.units() if unit == "rank_batch" else w.steps()
        scores = expected_scores(w.dense, units, power, factor)
        return {name: scores[name] for name in WEIGHTS}

    return expected


def once_per_backward(w: Wrapped) -> int:
    """Arguments and results of a reduce-scatter of 4 bytes per element, and of a sum at the end."""
    return 2000 + 12 * sum(p.numel() for p in w.dense.parameters()) * (NUM_BATCHES + 1)


@dataclass(frozen=True)
class Entry:
    """A criterion.

    Attributes:
        run: the loop of a caller; returns scores.
        expected: the scores of one process.
        baseline: the same forwards and backwards without the criterion.
        most_bytes: an upper bound on what ``run`` sends more than ``baseline``.
        key: the order in which elements are pruned.
    """

    run: Callable[[Wrapped], Mapping]
    expected: Callable[[Wrapped], Named]
    baseline: Callable[[Wrapped], None] = step_by_step
    most_bytes: Callable[[Wrapped], int] = lambda w: 300
    key: Callable[[float], float] = abs


def of_moment(unit: str, make: type, power: int, factor: float, options: dict) -> Entry:
    def made(pairs: list) -> criteria.Criterion:
        return make(pairs, unit=unit, **options)

    expected = moments(unit, power, factor)
    if unit == "global_batch":
        return Entry(by_steps(made, is_weighted=True), expected)
    return Entry(by_rank_batches(made), expected, own_batches, once_per_backward)


def custom(pairs: list) -> criteria.Criterion:
    return criteria.Custom(
        pairs, lambda w, g, s: s + (w.float() * g.float()) ** 2, unit="global_batch"
    )


ENTRIES = {
    # 1810.02340, equation 5; 2005.07683, equation 3, with fixed weights.
    "SNIP": Entry(by_steps(SNIP), sums_of(lambda w, gs: (w * sum(gs)).abs())),
    "Movement": Entry(
        by_steps(criteria.Movement), sums_of(lambda w, gs: -(w * sum(gs))), key=float
    ),
    "GradientMagnitude": Entry(
        by_steps(criteria.GradientMagnitude), sums_of(lambda w, gs: sum(gs).abs())
    ),
    "Custom": Entry(by_steps(custom), sums_of(lambda w, gs: sum((g * w) ** 2 for g in gs))),
    **{
        f"{title}, {unit}": of_moment(unit, make, power, factor, options)
        for unit in ("global_batch", "rank_batch")
        for title, make, power, factor, options in (
            ("Taylor, power 1", criteria.Taylor, 1, 1.0, {"power": 1}),
            ("Taylor, power 2", criteria.Taylor, 2, 1.0, {"power": 2}),
            ("Fisher", Fisher, 2, 0.5, {}),  # of Optimal Brain Damage
        )
    },
}
WRAPPINGS = wrappings.sampled(wrappings.TRAINED)
LOOPED = wrappings.sampled(wrappings.ALL)
CASES = list(product(ENTRIES, ("integer float32", "integer bfloat16", "float32")))


@wrappings.sharing_meshes
def differences(wrapping: str, cases: list[tuple[str, str]]) -> list[str]:
    wrong = []
    for title, data in cases:
        entry, is_integer = ENTRIES[title], data.startswith("integer")
        averages = entry.baseline is step_by_step
        w = Wrapped(wrapping, data, are_replicas=averages)
        with Traffic() as baseline:
            entry.baseline(w)
        with Traffic() as traffic:
            scores = entry.run(w)
        if is_integer:  # in one process sums of outputs would be rounded in bf16
            w.dense.float()
            w.data = data.replace("bfloat16", "float32")
        expected = entry.expected(w)
        assert all(score.any() for score in expected.values()), "which tests nothing"
        found = wrong_scores(w.model, scores, expected, w.indices, data, 2e-6)
        extra = traffic.num_bytes - baseline.num_bytes
        if extra > entry.most_bytes(w):
            found.append(f"{extra} bytes were sent, not {entry.most_bytes(w)}")
        method = prune.LowestScore if entry.key is float else prune.L1Unstructured
        prune.global_unstructured(w.matrices, method, scores, amount=AMOUNT)
        if is_integer:
            keeps = reference.prune(list(expected.values()), AMOUNT, key=entry.key)
            keeps = dict(zip(WEIGHTS, keeps, strict=True))
            found += wrong_masks(w.model, keeps, w.indices)
        wrong += [f"{title}, {data}: {each}" for each in found]
    return wrong


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_scores_and_masks_are_those_of_one_process(wrapping):
    """Scores are equal bit for bit where sums are exact; and then so are masks."""
    cases = every(9, CASES, WRAPPINGS.index(wrapping))
    assert_nothing_wrong_on(wrapping, differences, cases)


# Averaged gradients in training loops.


def global_fisher(pairs: list) -> Fisher:
    return Fisher(pairs, unit="global_batch")


def wrong_after(w: Wrapped, criterion: criteria.Criterion, expected: Named, when: str) -> list[str]:
    found = wrong_scores(w.model, criterion.scores(), expected, w.indices, w.data)
    return [f"{when}: {each}" for each in found]


def snip_of(w: Wrapped, gradients: list[Named]) -> Named:
    return {n: (v * sum(g[n] for g in gradients)).abs() for n, v in weights_of(w).items()}


def differences_when_accumulating(wrapping: str) -> list[str]:
    """One step of three micro-batches, the first two without synchronisation."""
    w = Wrapped(wrapping, "integer float32", are_replicas=True)
    criterion = SNIP(w.matrices)
    with criterion.calibrating(), criterion.batch():
        for number in range(NUM_BATCHES):
            is_last = number == NUM_BATCHES - 1
            with wrappings.synchronised(w.model, is_last):
                w.step(number)
            if not is_last and isinstance(w.model, FSDPModule | FullyShardedDataParallel):
                with pytest.raises(RuntimeError, match="without gradient synchronisation"):
                    criterion.update()
    wrong = [] if criterion.num_updates == 1 else [f"{criterion.num_updates} updates"]
    expected = snip_of(w, [gradients for _, gradients in w.steps()])
    return wrong + wrong_after(w, criterion, expected, "accumulated")


def differences_of_a_calibration(wrapping: str) -> list[str]:
    """A loop without zero_grad, with batches that fail in the middle; and contexts out of order."""
    w = Wrapped(wrapping, "integer float32", are_replicas=True)
    criterion = global_fisher(w.matrices)
    with criterion.calibrating():
        for number in range(NUM_BATCHES):
            with criterion.batch(weight=1.0):
                w.step(number)
            with contextlib.suppress(KeyError), criterion.batch():
                w.step(number)
                raise KeyError
    units = [(1.0, gradients) for _, gradients in w.steps()]
    expected = {n: s for n, s in expected_scores(w.dense, units, 2, 0.5).items() if n in WEIGHTS}
    wrong = wrong_after(w, criterion, expected, "calibrated")
    for message in ("has a gradient already", "inside of calibrating"):
        with contextlib.ExitStack() as stack:
            w.model.zero_grad()
            if message == "inside of calibrating":
                stack.enter_context(criterion.calibrating())
            else:
                w.step(0)
            with pytest.raises(RuntimeError, match=message), criterion.calibrating():
                pass
    return wrong


def differences_when_not_finite(wrapping: str) -> list[str]:
    """A step whose gradient is infinite in one element, which only one rank of FSDP has."""
    wrong = []
    for how, counts in (("skip", (2, 1)), ("refuse", (3, 0))):
        w = Wrapped(wrapping, "integer float32", are_replicas=True)
        criterion = SNIP(w.matrices, non_finite=how)
        for number in range(NUM_BATCHES):
            w.step(number)
            if number == 1:
                gradient = wrappings.gradient(w.model, "l2.weight", w.indices)
                gradient[w.indices["l2.weight"] == 7] = torch.inf
            criterion.update()
            w.model.zero_grad()
        if how == "skip":
            steps = [gradients for _, gradients in w.steps()]
            wrong += wrong_after(w, criterion, snip_of(w, steps[::2]), how)
        else:
            text = "l2.weight has a score that is not finite, after 3 updates"
            with pytest.raises(ValueError, match=text):
                criterion.scores()
        if (criterion.num_updates, criterion.num_skipped) != counts:
            wrong.append(f"{how}: {criterion.num_updates}, {criterion.num_skipped} skipped")
    return wrong


IN_LOOPS = [
    differences_when_accumulating, differences_of_a_calibration, differences_when_not_finite,
]  # fmt: skip


@wrappings.sharing_meshes
def differences_in_loops(wrapping: str, checks: list[Callable]) -> list[str]:
    return [text for check in checks for text in check(wrapping)]


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", LOOPED)
def test_loops_of_training(wrapping):
    checks = every(2, IN_LOOPS, LOOPED.index(wrapping))
    assert_nothing_wrong_on(wrapping, differences_in_loops, checks)


def read_before_the_ranks_agree() -> str:
    """DDP leaves local gradients after no_sync, which look like averaged ones."""
    w = Wrapped("ddp-2", "integer float32")
    criterion = SNIP(w.matrices)
    with w.model.no_sync():
        w.step(0)
    criterion.update()
    method, scores = SNIP.pruning_method, criterion.scores()
    text = raised(lambda: prune.global_unstructured(w.matrices, method, scores, amount=0.5))
    assert not prune.is_pruned(w.model)
    return text


def different_numbers_of_updates() -> str:
    w = Wrapped("plain-2", "integer float32", are_replicas=True)
    criterion = SNIP(w.matrices)
    w.step(0)
    for _ in range(dist.get_rank() + 1):
        criterion.update()
    return raised(criterion.scores)


def unreduced(kind: str) -> str:
    """Gradients that FSDP2 keeps apart until a later backward reduces them."""
    options = {}
    if kind == "mixed precision":  # kept in the dtype of the reduction
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    wrapping = "hsdp-2x2" if kind == "no all-reduce" else "fsdp2-2"
    w = Wrapped(wrapping, "float32", **options)
    criterion = SNIP(w.matrices)
    if kind == "no all-reduce":  # summed over the shards, and not yet over the replicas
        w.model.set_requires_all_reduce(False)
    else:
        w.model.set_requires_gradient_sync(False)
    w.step(0)
    return raised(criterion.update)


UNREDUCED = "RuntimeError: l1.weight: a backward without gradient synchronisation"
REFUSALS = {  # number of ranks, what is called, parts of the error on every rank
    "gradients of DDP that are not averaged": (
        2, read_before_the_ranks_agree, (), ("ValueError", "l1.weight", "replica")
    ),
    "other numbers of updates": (
        2, different_numbers_of_updates, (),
        ("ValueError", "number of updates: 1", "number of updates: 2"),
    ),
    "no all-reduce": (4, unreduced, ("no all-reduce",), (UNREDUCED,)),
    "no reduction": (2, unreduced, ("no reduction",), (UNREDUCED,)),
    "mixed precision": (2, unreduced, ("mixed precision",), (UNREDUCED,)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_gradients_that_are_not_those_of_all_ranks_are_refused(case):
    size, call, arguments, parts = REFUSALS[case]
    for text in run_ranks(call, size, *arguments):
        assert all(part in text for part in parts), text


def test_global_mask_refuses_signed_scores_without_the_sign():
    layer = nn.Linear(3, 2)
    movement = criteria.Movement([(layer, "weight")])
    layer.weight.grad = torch.ones(2, 3)
    movement.update()
    pairs = movement.parameters
    with pytest.raises(TypeError, match="expected signed=True"):
        prune.global_mask(pairs, 3, scores=movement.scores())
    (mask,) = prune.global_mask(pairs, 3, scores=movement.scores(), signed=True).masks
    lowest = (-layer.weight.detach()).flatten().sort().indices[:3]
    assert not mask.flatten()[lowest].any() and int(mask.sum()) == 3


# States: saved on some ranks and loaded on others, the scores are the same bits.

CRITERIA = {"SNIP": SNIP, "Fisher": global_fisher}
SIZES_FOR = "fsdp2_tp-1x2"


def random_case(wrapping: str, kind: str) -> tuple[Wrapped, criteria.Criterion]:
    """Random data, so that all bits of an accumulator matter; the same on every sharding."""
    w = Wrapped(wrapping, "float32", sizes_for=SIZES_FOR, are_replicas=True)
    return w, CRITERIA[kind](w.matrices)


def save(wrapping: str, kind: str, path: str) -> tuple[list, list[str]]:
    """Two units; this rank's (scores, indices); and what a criterion that takes over gets wrong."""
    w, criterion = random_case(wrapping, kind)
    for number in range(2):
        w.step(number)
        criterion.update(weight=0.37)
        w.model.zero_grad()
    dcp.save({"criterion": criterion.state_dict()}, checkpoint_id=path)
    scores = [wrappings.local(score).clone() for score in criterion.scores().values()]
    second = CRITERIA[kind](w.matrices)
    second.load_state_dict(criterion.state_dict())
    w.step(2)
    for each in (criterion, second):
        each.update()
    pairs = zip(criterion.scores().values(), second.scores().values(), strict=True)
    equal = all(torch.equal(wrappings.local(a), wrappings.local(b)) for a, b in pairs)
    wrong = [] if equal else ["another criterion does not go on as the first one does"]
    return list(zip(scores, (w.indices[name] for name in WEIGHTS), strict=True)), wrong


def load(wrapping: str, kind: str, path: str, expected: Named) -> list[str]:
    w, criterion = random_case(wrapping, kind)
    state = {"criterion": criterion.state_dict()}
    dcp.load(state, checkpoint_id=path)
    criterion.load_state_dict(state["criterion"])
    wrong = []
    for name, score in zip(WEIGHTS, criterion.scores().values(), strict=True):
        if not torch.equal(
            wrappings.local(score), wrappings.my_part(expected[name], w.indices[name])
        ):
            wrong.append(f"{name}: other scores")
    if (criterion.num_updates, criterion.total_weight) != (2, 0.74):
        wrong.append(f"{criterion.num_updates} updates of weight {criterion.total_weight}")
    return wrong


@pytest.mark.parametrize("kind", CRITERIA)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    every(
        2,
        [
            ("fsdp2-2", ["fsdp2-3", "plain-1", "fsdp2_tp-2x2"]),
            ("fsdp1-2", ["fsdp1-2"]),
            ("fsdp1_root-3", ["fsdp1_root-3"]),
            ("fsdp1_hybrid-2x2", ["fsdp1_hybrid-2x2"]),
            ("plain-1", ["fsdp2-2", "tp-2"]),
            ("hsdp-2x2", ["ddp-2", "fsdp2-2"]),
            ("fsdp2_tp-2x2", ["fsdp2-3", "plain-1"]),
        ],
    ),
)
def test_saved_here_and_loaded_there(saved, loaded, kind, tmp_path):
    per_rank = run_ranks(save, wrappings.world_size(saved), saved, kind, str(tmp_path))
    assert_nothing_wrong(wrong for _, wrong in per_rank)
    parts = zip(*(found for found, _ in per_rank), strict=True)
    shapes = dict(zip(WEIGHTS, ((12, 6), (5, 12), (3, 5)), strict=True))
    expected = {n: assembled(p, shapes[n]) for n, p in zip(WEIGHTS, parts, strict=True)}
    for wrapping in loaded:
        assert_nothing_wrong_on(wrapping, load, kind, str(tmp_path), expected)


def continued(wrapping: str, state: dict | None = None) -> tuple[dict, list[str]]:
    """One of two calibrations; the second one, on another sharding, goes on with whole sums."""
    w = Wrapped(wrapping, "integer float32", sizes_for="tp-2")
    pairs = zip(w.pairs, fqns(w.dense), strict=True)
    criterion = Fisher(
        [prune.NamedParameter(*pair, name) for pair, name in pairs], unit="rank_batch"
    )
    if state is not None:
        criterion.load_state_dict(state)
    w.calibrate(criterion)
    units = w.units()
    if state is not None:
        return {}, w.wrong(criterion, units + gradients_of_units(w.dense, w.data, 2, 3))
    saved = criterion.state_dict()
    whole = {name: tensor.full_tensor() for name, tensor in saved["accumulators"].items()}
    return {**saved, "accumulators": whole}, w.wrong(criterion, units)


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-3", "fsdp1-2", "fsdp2-3", "hsdp-2x2"])
def test_a_saved_calibration_goes_on_elsewhere(wrapping):
    (state, wrong), _ = run_ranks(continued, 2, "fsdp2-2")
    assert not wrong
    ranks = run_ranks(continued, wrappings.world_size(wrapping), wrapping, state)
    assert_nothing_wrong(wrong for _, wrong in ranks)


# Scores of matrices that no gradient reached, such as experts without tokens.


# By name: the matrices that get no gradient; of fused experts, by number.
EMPTY = {"experts.1.weight": [0], "fused.weight": [0, 3], "zero.weight": []}
KINDS = {
    "SNIP": lambda pairs: criteria.SNIP(pairs),
    "Taylor": lambda pairs: criteria.Taylor(pairs, unit="global_batch", power=1),
    "Fisher": lambda pairs: criteria.Fisher(pairs, unit="global_batch"),
}


class Weight(nn.Module):
    """A weight whose gradient is a given tensor."""

    def __init__(self, shape, empty):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        gradient = torch.randn(shape)
        for number in empty:
            gradient[number if len(shape) == 3 else slice(None)] = 0
        self.register_buffer("gradient", gradient)

    def forward(self):
        return (self.weight * self.gradient).sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        empty = lambda name: EMPTY.get(f"{name}.weight", [])  # noqa: E731
        experts = [Weight((6, 4), empty(f"experts.{n}")) for n in range(3)]
        self.moe = nn.ModuleDict({"experts": nn.ModuleList(experts)})
        self.moe["fused"] = Weight((5, 3, 4), empty("fused"))
        self.moe["conv"] = nn.Conv1d(2, 3, 2, bias=False)  # no stack of matrices
        self.moe["zero"] = Weight((3, 3), [])
        self.moe["zero"].weight.data.zero_()  # nothing to rank

    def forward(self):
        weights = [*self.moe["experts"], self.moe["fused"], self.moe["zero"]]
        return sum(each() for each in weights) + self.moe["conv"].weight[1:].sum()


def expected_scores_of_empty(kind, model):
    """By name, from whole weights and gradients."""
    model().backward()
    scores, magnitudes = {}, {}
    for name, p in model.named_parameters():
        product = (p * p.grad).detach()
        scores[name] = product.square() / 2 if kind == "Fisher" else product.abs()
        magnitudes[name] = p.detach().abs()
    experts = [f"moe.experts.{n}.weight" for n in range(3)]
    stacks = [[(scores[n], magnitudes[n]) for n in experts]]
    stacks += [list(zip(scores["moe.fused.weight"], magnitudes["moe.fused.weight"], strict=True))]
    for matrices in stacks:
        seen = [float(s.sum() / m.sum()) for s, m in matrices if s.any()]
        assert 0 < len(seen) < len(matrices)
        for score, magnitude in matrices:
            if not score.any():
                score.copy_(magnitude * (sum(seen) / len(seen)))
    assert not scores["moe.conv.weight"][0].any() and not scores["moe.zero.weight"].any()
    return scores


def wrong_scores_of_empty(wrapping, kind):
    expected, model = expected_scores_of_empty(kind, Net()), wrappings.wrap(Net(), wrapping)
    pairs = prune.select(model, include="*")
    criterion = KINDS[kind](pairs)
    model().backward()
    criterion.update()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores = criterion.scores()
    wrong = [str(w.message) for w in caught if "all gradients are zero of" not in str(w.message)]
    if len(caught) != (not dist.is_initialized() or dist.get_rank() == 0):
        wrong.append(f"{len(caught)} warnings")
    for part in criterion._parts():
        try:
            own = part.shard.slice_of(expected[part.label])
            found = wrappings.local(scores[part.pair])
            torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-9)
        except AssertionError as error:
            wrong.append(f"{part.label}: {error}")
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_scored_by_magnitude_times_what_their_siblings_score(kind):
    assert wrong_scores_of_empty("plain-1", kind) == []


@pytest.mark.parametrize("wrapping", ["ddp-3", "fsdp1_root-3", "fsdp2_root-3"])
def test_of_shards_too(wrapping):
    assert_nothing_wrong_on(wrapping, wrong_scores_of_empty, "Taylor")


def test_the_warning_names_them_and_gradients_alone_are_not_filled():
    model = Net()
    pairs = prune.select(model, include="*")
    taylor, magnitude = KINDS["Taylor"](pairs), criteria.GradientMagnitude(pairs)
    model().backward()
    for criterion in (taylor, magnitude):
        criterion.update()
    text = r"zero of moe\.experts\.1\.weight, moe\.fused\.weight \(experts 0, 3\) \(3 of 10 matri"
    with pytest.warns(UserWarning, match=text):
        taylor.scores()
    assert not any(s.any() for pair, s in magnitude.scores().items() if "s.1" in pair.fqn)
