"""Ways to prune with scores, budgets and channels: on any wrapping that of one process.

A row prunes a model some times and returns what its reports say. The same row on one rank's whole
model tells what masks and facts to expect; it is compared with an oracle, or tested in tests/unit.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import distprune as prune
from distprune import budgets, dynamic, schedule
from distprune.call.reading import SignedScores
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, outcome, wrong_masks
from helpers.models import EVEN, UNEVEN, Net, fill, target
from helpers.sampling import every

NAMES = ["l2.weight", "l1.weight", "l1.bias", "l3.weight", "l3.bias"]
WEIGHTS = ["l3.weight", "l1.weight", "l2.weight"]
HALF = {"amount": 0.5}
LOWEST, RANDOM = {"method": prune.LowestScore}, {"method": prune.RandomUnstructured}
RATIOS = dict(zip(NAMES, (0.1, 0.4, 0.2, 0.3, 0.0), strict=True))
SHARES = dict(zip(NAMES, (0.5, 0.25, 0.0, 0.75, 1.0), strict=True))
WRAPPINGS = wrappings.sampled(wrappings.ALL + wrappings.FSDP2_DIM1)


class Subject:
    """A model to prune: on a wrapping, or whole on this rank, whose group is then of one."""

    def __init__(self, wrapping: str, data="normal", dtype="float32", sizes=None, group=None):
        dense = fill(Net(sizes or UNEVEN), data, dtype)
        self.wrapping, self.sizes, self.group = wrapping, sizes or UNEVEN, group
        self.whole = {name: p.detach().clone() for name, p in dense.named_parameters()}
        self.indices = wrappings.local_indices(dense, wrapping)
        self.model = wrappings.wrap(dense, wrapping)

    def pair(self, name: str) -> prune.NamedParameter:
        return prune.NamedParameter(*target(wrappings.unwrapped(self.model), name), name)

    def pairs(self, names=NAMES) -> list[prune.NamedParameter]:
        return [self.pair(name) for name in names]

    def given(self, scores: dict[str, Tensor]) -> dict:
        return {self.pair(name): value for name, value in scores.items()}

    def shards(self, scores: dict[str, Tensor]) -> dict:
        """Scores as this rank has them: parameters of another model under the wrapping."""
        scorer = Net(self.sizes)
        scorer.load_state_dict(scores, strict=False)
        scorer = wrappings.wrap(scorer, self.wrapping)
        parts = {name: wrappings.shard(scorer, name, self.indices, True) for name in scores}
        return self.given(parts)

    def prune(self, method=prune.L1Unstructured, names=NAMES, scores=None, **options) -> list:
        torch.manual_seed(3)  # of random scores
        report = prune.global_unstructured(
            self.pairs(names), method, scores, group=self.group, **options
        )
        return [entry.num_pruned for entry in report.parameters]

    def masks(self) -> dict[str, Tensor]:
        buffers = wrappings.unwrapped(self.model).named_buffers()
        return {name.removesuffix("_mask"): mask.bool() for name, mask in buffers}


@dataclass(frozen=True)
class Row:
    """A way to prune.

    Attributes:
        run: prunes a Subject; returns facts of its reports.
        oracle: from the values, by name, the masks of one process; none by default.
        data, dtype: of the parameters; see helpers.models.fill.
    """

    run: Callable[[Subject], object]
    oracle: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda values: {}
    data: str = "normal"
    dtype: str = "float32"


def few_scores(values: dict[str, Tensor], names=WEIGHTS, dtype="float32") -> dict[str, Tensor]:
    """Signed scores with ties; some are -0.0."""
    generator = torch.Generator().manual_seed(7)
    drawn = {n: torch.randint(-4, 5, values[n].shape, generator=generator) for n in names}
    return {name: (-steps / 2).to(getattr(torch, dtype)) for name, steps in drawn.items()}


def in_rounds(amounts, scores_of: Callable, key=abs) -> Callable:
    """An oracle of successive calls; scores_of gets the values and masks by name."""

    def oracle(values: dict[str, Tensor]) -> dict[str, Tensor]:
        keeps = None
        for amount in amounts:
            scores = scores_of(values, keeps)
            found = reference.prune([*scores.values()], amount, keeps and [*keeps.values()], key)
            keeps = dict(zip(scores, found, strict=True))
        return keeps

    return oracle


def signed(dtype: str, with_shards: bool) -> Row:
    """The lowest signed scores go, whole ones first, and then those of each rank's own part."""

    def run(s: Subject) -> list:
        scores = few_scores(s.whole, dtype=dtype)
        facts = [s.prune(prune.LowestScore, WEIGHTS, s.given(scores), amount=0.3)]
        if with_shards:
            given = SignedScores(s.shards(scores))
            facts.append(s.prune(prune.LowestScore, WEIGHTS, given, amount=0.5))
        return facts

    amounts = (0.3, 0.5)[: 1 + with_shards]
    scores_of = lambda values, keeps: few_scores(values, dtype=dtype)  # noqa: E731
    return Row(run, in_rounds(amounts, scores_of, key=lambda score: score + 0.0))


def terms_for(shape: torch.Size, seed: int) -> list[list[Tensor]]:
    """One to three terms with factors along the first and the last dimension."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand([shape[0], *[1] * (len(shape) - 1)], generator=generator) + 0.1
    columns = torch.rand([1, *shape[1:]], generator=generator) + 0.1
    return [[columns], [rows, columns], [rows]][: 1 + seed % 3]


def factored(normalize: str | None, data: str, dtype: str, has_factors: bool = True) -> Row:
    """Factored scores of all parameters but one, and normalisation, in two rounds."""
    amounts = (0.4, 0.5)

    def terms(values: dict[str, Tensor]) -> dict[str, list]:
        chosen = {name: terms_for(values[name].shape, seed) for seed, name in enumerate(NAMES)}
        return {name: t for name, t in chosen.items() if has_factors and name != "l1.weight"}

    def run(s: Subject) -> list:
        given = {name: prune.FactoredScores(t) for name, t in terms(s.whole).items()}
        return [s.prune(scores=s.given(given), amount=a, normalize=normalize) for a in amounts]

    def scores_of(values: dict[str, Tensor], keeps: dict[str, Tensor] | None) -> dict:
        """|w| * m in float32 or float64, with one rounding per operation."""
        scores, factors = {}, terms(values)
        for name in NAMES:
            score, wide = values[name], torch.promote_types(values[name].dtype, torch.float32)
            if name in factors:
                products = (functools.reduce(torch.mul, t) for t in factors[name])
                score = score.abs().to(wide) * functools.reduce(torch.add, products).to(wide)
            keep = torch.ones(score.shape, dtype=torch.bool) if keeps is None else keeps[name]
            scores[name] = reference.normalized(score, normalize, keep)
        return scores

    return Row(run, in_rounds(amounts, scores_of), data, dtype)


# Channels: name, dimension, indices per channel, whether the part is ranked.
GROUPS = {
    "hidden": [("l1.weight", 0, 2, True), ("l1.bias", 0, 2, False), ("l2.weight", 1, 2, True)],
    "last": [("l3.weight", -1, 1, True)],
    "bias": [("l2.bias", 0, 1, True)],
}
RANKED = ["l1.weight", "l2.weight", "l3.weight", "l2.bias"]
IN_GROUPS = [*RANKED, "l1.bias"]


def prune_channels(s: Subject, scores=None, **options) -> list:
    groups = {
        name: [prune.ChannelPart(s.pair(p), dim, size, rank) for p, dim, size, rank in parts]
        for name, parts in GROUPS.items()
    }
    options |= {"importance_scores": s.given(scores) if scores else None, "group": s.group}
    report = prune.global_structured(groups, **options)
    counts = [entry.num_pruned for entry in report.parameters]
    return [[group.num_pruned_now for group in report.groups], report.threshold, counts]


def lowest_channels(scores, keeps: dict[str, Tensor], amount, n: float, normalize) -> None:
    """The oracle of one call: a loop over the channels of whole tensors, into the masks."""
    ranked = []
    for position, parts in enumerate(GROUPS.values()):
        norms = {}
        for c in range(scores[parts[0][0]].shape[parts[0][1]] // parts[0][2]):
            cut = {name: slice_of(keeps[name], dim, size, c) for name, dim, size, _ in parts}
            if any(keep.any() for keep in cut.values()):
                terms = [
                    (slice_of(scores[name], dim, size, c).double() * cut[name]).flatten()
                    for name, dim, size, is_ranked in parts
                    if is_ranked
                ]
                norms[c] = float(torch.linalg.vector_norm(torch.cat(terms), n))
        values = torch.tensor(list(norms.values()), dtype=torch.float64)
        divisor = float(values.square().mean().sqrt()) if normalize else 1.0
        ranked += [(norm / (divisor or 1.0), position, c) for c, norm in norms.items()]
    for _, position, c in sorted(ranked)[: reference.num_to_prune(amount, len(ranked))]:
        for name, dim, size, _ in [*GROUPS.values()][position]:
            slice_of(keeps[name], dim, size, c).fill_(False)


def slice_of(tensor: Tensor, dim: int, size: int, channel: int) -> Tensor:
    return tensor.narrow(dim, channel * size, size)


def by_channel(n: float, data: str, dtype="float32", normalize=None, given="") -> Row:
    """global_structured, twice, with elements pruned one by one between the calls."""

    def factor(value: Tensor) -> Tensor:
        return torch.arange(1.0, value.shape[-1] + 1).view([1] * (value.ndim - 1) + [-1])

    def run(s: Subject) -> list:
        scores = few_scores(s.whole, RANKED) if given == "tensors" else {}
        if given == "factors":
            scores = {n: prune.FactoredScores([[factor(s.whole[n])]]) for n in RANKED}
        options = {"scores": scores, "n": n, "normalize": normalize}
        first = prune_channels(s, amount=0.3, **options)
        return [first, s.prune(names=IN_GROUPS, amount=0.3), prune_channels(s, amount=2, **options)]

    def oracle(values: dict[str, Tensor]) -> dict[str, Tensor]:
        scores = dict(values)
        if given == "tensors":
            scores |= few_scores(values, RANKED)
        if given == "factors":
            scores |= {name: values[name] * factor(values[name]) for name in RANKED}
        keeps = {name: torch.ones(values[name].shape, dtype=torch.bool) for name in IN_GROUPS}
        lowest_channels(scores, keeps, 0.3, n, normalize)
        found = reference.prune([values[name] for name in IN_GROUPS], 0.3, [*keeps.values()])
        keeps = dict(zip(IN_GROUPS, found, strict=True))
        lowest_channels(scores, keeps, 2, n, normalize)
        return keeps

    return Row(run, oracle, data, dtype)


# The amounts of two successive calls, as functions of the parameters or of their shapes.
BUDGETS = {
    "uniform": (lambda p: budgets.uniform(p, 0.3), lambda p: budgets.uniform(p, 0.6)),
    "erk": (lambda p: budgets.erk(p, 0.3), lambda p: budgets.erk(p, 0.5, max_sparsity=0.8)),
    "owl": (lambda p: budgets.owl(p, 0.4, RATIOS, lam=0.2), lambda p: budgets.owl(p, 0.5, RATIOS)),
    "mapping": (lambda p: SHARES, lambda p: dict.fromkeys(NAMES, 0.6)),
}


def by_calls(*calls: dict, names=NAMES, scores: str = "") -> Row:
    """Calls of global_unstructured, whose amount may be a function of the shapes."""

    def run(s: Subject) -> list:
        shapes, given = {name: tuple(s.whole[name].shape) for name in names}, {}
        if scores == "signed":
            given = few_scores(s.whole, names)
        if scores == "factors":
            terms = {name: terms_for(s.whole[name].shape, i) for i, name in enumerate(names)}
            given = {name: prune.FactoredScores(each) for name, each in terms.items()}
        facts = []
        for call in calls:
            amount = call.get("amount")
            made = call | ({"amount": amount(shapes)} if callable(amount) else {})
            facts.append(s.prune(names=names, scores=s.given(given) or None, **made))
        return facts

    return Row(run)


def in_steps(s: Subject) -> list:
    """A schedule with bounds, and normalised scores."""
    ramp = schedule.Cubic(0, 2, 1, final_sparsity=0.7, initial_sparsity=0.2)
    options = {"max_sparsity": 0.75, "normalize": "rms", "group": s.group}
    pruner = schedule.ScheduledPruner(s.pairs(), ramp, **options)
    return [pruner.step().num_pruned for _ in range(3)]


def dropped_and_grown(s: Subject) -> list:
    """SET, twice: elements grow at random."""
    facts = s.prune(names=WEIGHTS, amount=0.5)
    for seed in (1, 2):
        torch.manual_seed(seed)
        report = dynamic.set_step(s.pairs(WEIGHTS), 0.3, group=s.group)
        facts += [entry.num_grown for entry in report.parameters]
    return facts


ROWS = {
    **{f"signed {dtype}": signed(dtype, dtype == "float32")
       for dtype in ("float32", "bfloat16", "float64", "int64")},
    "factors": factored("rms", "normal", "float64"),
    "factors of ties": factored("l2", "few", "mixed"),
    "factors of equal values": factored(None, "equal", "bfloat16"),
    "factors of zeros": factored("mean", "zeros", "float16"),
    "factors of tiny values": factored("mean", "denormal", "float32"),
    "normalised": factored("rms", "rounded", "bfloat16", has_factors=False),
    "normalised mixed": factored("l2", "normal", "mixed", has_factors=False),
    "channels": by_channel(2, "few"),
    "channels rms": by_channel(2, "normal", normalize="rms"),
    "channels of ties": by_channel(1, "equal", "bfloat16"),
    "channels 1": by_channel(1, "normal"),
    "channels float16": by_channel(2, "few", "float16"),
    "channels inf": by_channel(float("inf"), "rounded"),
    "channels float64": by_channel(2, "normal", "float64"),
    "channels by scores": by_channel(1, "rounded", given="tensors"),
    "channels by factors": by_channel(1, "few", given="factors"),
    **{f"budget {name}": by_calls(*({"amount": amount} for amount in amounts))
       for name, amounts in BUDGETS.items()},
    "budget of scores": by_calls({"amount": BUDGETS["erk"][0]}, scores="factors"),
    "bounds of scores": by_calls({**HALF, "min_sparsity": 0.3, "max_sparsity": 0.6},
                                 scores="factors"),
    "bounds of signed scores": by_calls({**LOWEST, **HALF, "max_sparsity": 0.6, "normalize": "rms"},
                                        names=WEIGHTS, scores="signed"),
    "rows of scores": by_calls({"scope": "row", **HALF}, names=WEIGHTS, scores="factors"),
    "rows of signed scores": by_calls({**LOWEST, "scope": "row", **HALF}, names=WEIGHTS,
                                      scores="signed"),
    "rows at random": by_calls({**RANDOM, "scope": "row", **HALF}, names=WEIGHTS),
    "layers of signed scores": by_calls({**LOWEST, "scope": "layer", **HALF}, names=WEIGHTS,
                                        scores="signed"),
    "1:2 of scores": by_calls({"pattern": "1:2"}, names=NAMES[:2], scores="factors"),
    "1:2 of signed scores": by_calls({**LOWEST, "pattern": "1:2"}, names=NAMES[:2],
                                     scores="signed"),
    "1:2 at random": by_calls({**RANDOM, "pattern": "1:2"}, names=NAMES[:2]),
    "schedule": Row(in_steps),
    "drop and grow": Row(dropped_and_grown),
}  # fmt: skip


@wrappings.sharing_meshes
def differences(wrapping: str, names: list[str]) -> list[str]:
    alone = dist.new_subgroups(1)[0]
    wrong = []
    for name in names:
        row = ROWS[name]
        sizes = EVEN if wrapping.startswith("fsdp2_dim1") else UNEVEN
        # A flat parameter has one dtype.
        is_flat = wrapping.startswith("fsdp1") and row.dtype == "mixed"
        made = row.data, "float32" if is_flat else row.dtype, sizes
        single = Subject("plain-1", *made, alone)
        expected = row.run(single)
        keeps = single.masks()
        for other, keep in row.oracle(single.whole).items():
            wrong += [f"{name} {other}: not the oracle's"] * (not torch.equal(keep, keeps[other]))
        sharded = Subject(wrapping, *made)
        found = row.run(sharded)
        wrong += [] if found == expected else [f"{name}: {found}, not {expected}"]
        wrong += wrong_masks(sharded.model, keeps, sharded.indices, name)
        wrong += [f"{name}: {problem}" for problem in prune.verify(sharded.model).problems]
    return wrong


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_masks_and_reports_are_those_of_one_process(wrapping):
    rows = every(4, ROWS, WRAPPINGS.index(wrapping))
    assert_nothing_wrong_on(wrapping, differences, rows)


def bytes_of_channels(size: int) -> int:
    s = Subject("fsdp2-2", sizes=(size, size, size, 4))
    parts = [prune.ChannelPart(s.pair("l1.weight"), 0), prune.ChannelPart(s.pair("l2.weight"), 1)]
    groups = {str(i): [part] for i, part in enumerate(parts)}
    return prune.global_structured(groups, amount=0.5).bytes_sent


def test_bytes_are_per_channel():
    small, other = run_ranks(bytes_of_channels, 2, 16)
    large, _ = run_ranks(bytes_of_channels, 2, 64)
    assert small == other
    assert large - small == 16 * 2 * (64 - 16)  # 16 bytes for each channel of two groups


def pruning(**options) -> Callable[[Subject], Callable]:
    """A call for the table of mistakes; scores are made of the subject."""

    def prepare(s: Subject) -> Callable:
        made = {k: v(s) if k == "scores" and callable(v) else v for k, v in options.items()}
        return functools.partial(s.prune, **made)

    return prepare


def by_channels(**options) -> Callable[[Subject], Callable]:
    return lambda s: functools.partial(prune_channels, s, **{"amount": 0.5, **options})


def scores_with(value: float) -> Callable[[Subject], dict]:
    """Scores of l3.weight, one of which is this value."""

    def make(s: Subject) -> dict:
        scores = torch.ones(s.whole["l3.weight"].shape)
        scores[2, 1] = value
        return s.given({"l3.weight": scores})

    return make


def factors_of(number: float) -> Callable[[Subject], dict]:
    return lambda s: s.given({"l1.weight": prune.FactoredScores([[torch.full((1, 6), number)]])})


def step_of(which: Callable, sparsity=0.5, load=(), names=WEIGHTS, **options) -> Callable:
    """A step of a schedule; its pruner may have loaded another state."""

    def prepare(s: Subject) -> Callable:
        plan = schedule.OneShot(0, 0.5) if which is schedule.OneShot else which(sparsity)
        pruner = schedule.ScheduledPruner(s.pairs(names), plan, **options)
        pruner.load_state_dict({**pruner.state_dict(), **dict(load)})
        return pruner.step

    return prepare


def constant(sparsity: float) -> schedule.Function:
    return schedule.Function(lambda step: sparsity)


def failing(sparsity: float) -> schedule.Function:
    return schedule.Function(lambda step: 1 // 0)


signed_scores = lambda s: SignedScores(s.given(few_scores(s.whole)))  # noqa: E731
# What one rank does, what the others do, and what the error of every rank says.
MISTAKES = {
    "another kind of amount": (pruning(amount=0.5), pruning(amount=SHARES), "amount: "),
    "another sparsity": (
        pruning(amount={**SHARES, "l1.weight": 0.5}), pruning(amount=SHARES),
        "segments of l1.weight",
    ),
    "another name": (
        pruning(amount={n.replace("l1.weight", "l9"): share for n, share in SHARES.items()}),
        pruning(amount=SHARES), "amount has 'l9'",
    ),
    "another scope": (
        pruning(scope="row", amount=0.5), pruning(scope="layer", amount=0.5), "scope|segments"
    ),
    "another pattern": (pruning(pattern="1:2"), pruning(pattern="1:3"), "pattern"),
    "other input dimensions": (
        pruning(pattern="1:2", names=WEIGHTS[1:], input_dims={"l2.*": 0}),
        pruning(pattern="1:2", names=WEIGHTS[1:]), "input",
    ),
    **{
        f"a NaN by {way}": (
            pruning(scores=scores_with(torch.nan), names=WEIGHTS, **way),
            pruning(scores=scores_with(1.0), names=WEIGHTS, **way), "l3.weight",
        )
        for way in ({"scope": "layer", "amount": 0.4}, {"scope": "row", "amount": 0.4})
    },
    "other factors": (
        pruning(amount=1, scores=factors_of(2.0)), pruning(amount=1, scores=factors_of(1.0)),
        "checksum",
    ),
    "an infinite score": (
        *[pruning(amount=3, scores=scores_with(torch.inf), normalize="rms")] * 2,
        r"l3.weight .*infinite scores",
    ),
    "an unknown normalisation": (
        pruning(amount=3, normalize="median"), pruning(amount=3, normalize="mean"),
        "normalize='median'",
    ),
    "signed scores of a method without signs": (
        *[pruning(amount=2, scores=signed_scores)] * 2,
        r"ranked by \|score\|.*prune.LowestScore",
    ),
    "signed scores of a schedule": (
        *[lambda s: step_of(constant, importance_scores=lambda: signed_scores(s))(s)] * 2,
        r"ranked by \|score\|.*prune.LowestScore",
    ),
    "channels: amount": (by_channels(), by_channels(amount=0.25), "amount"),
    "channels: norm": (by_channels(n=1), by_channels(n=2), "has n: "),
    "channels: NaN": (
        *[lambda s: by_channels(scores={"l3.weight": torch.full((3, 5), torch.nan)})(s)] * 2,
        "last, channels 0.* are nan",
    ),
    "channels: scores of another shape": (
        by_channels(scores={"l3.weight": torch.ones(3, 4)}),
        by_channels(scores={"l3.weight": torch.ones(3, 5)}), "l3.weight",
    ),
    "schedule: step": (
        step_of(constant, load={"num_steps": 7}), step_of(constant), "step of the schedule: [07]"
    ),
    "schedule: kind": (
        step_of(schedule.OneShot), step_of(constant), r"schedule: (OneShot|Function)\("
    ),
    "schedule: target": (
        step_of(constant, 0.4), step_of(constant), r"target sparsity: 0\.[45]"
    ),
    "schedule: state": (
        step_of(constant, load={"sparsity": 0.9}), step_of(constant), r"target sparsity: 0\.[59]"
    ),
    "schedule: present sparsity by rows": (
        step_of(constant, load={"sparsity": 0.25}, scope="row"), step_of(constant, scope="row"),
        "present sparsity",
    ),
    "schedule: error": (step_of(failing), step_of(constant), "ZeroDivisionError"),
    "schedule: scores that fail": (
        step_of(constant, importance_scores=lambda: {}["no"]),
        step_of(constant, importance_scores=lambda: {}), "KeyError|no",
    ),
    "schedule: a function for scores": (
        step_of(constant, importance_scores=lambda: {}), step_of(constant, importance_scores={}),
        "importance_scores",
    ),
}  # fmt: skip


@wrappings.sharing_meshes
def outcomes(wrapping: str) -> dict[str, tuple[str, str, list[str], bool]]:
    """(type, text, changes, whether a pruner is as before) that this rank sees, by mistake."""
    s = Subject(wrapping)
    s.prune(names=WEIGHTS, amount=0.2)
    is_odd, found = dist.get_rank() == dist.get_world_size() - 1, {}
    for name, (odd, usual, _) in MISTAKES.items():
        call = (odd if is_odd else usual)(s)
        pruner = getattr(call, "__self__", None)
        state = pruner and pruner.state_dict()
        found[name] = (*outcome(s.model, call), state == (pruner and pruner.state_dict()))
    return found


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-3", "fsdp1-2", "fsdp2-3", "hsdp-2x2", "tp-2"])
def test_a_mistake_of_one_rank_is_raised_on_all_and_changes_nothing(wrapping):
    wrong = []
    for rank, found in enumerate(run_ranks(outcomes, wrappings.world_size(wrapping), wrapping)):
        for name, (_, _, text) in MISTAKES.items():
            kind, message, *changed = found[name]
            if kind == "nothing" or not re.search(text, message) or changed != [[], True]:
                wrong.append(f"[rank {rank}] {name}: {kind}: {message} {changed}")
    assert not wrong, "\n".join(wrong)


def test_every_parameter_needs_a_signed_score():
    s = Subject("plain-1")
    given = s.given({"l1.weight": torch.ones(10, 6)})
    with pytest.raises(ValueError, match=r"l3\.weight has no importance_scores.*L1Unstructured"):
        s.prune(prune.LowestScore, WEIGHTS, given, amount=2)
    with pytest.raises(TypeError, match="never ranks values"):
        prune.LowestScore.apply(*s.pair("l1.weight")[:2], 1, None)
    assert not prune.is_pruned(s.model)
