"""The table: every operation on every wrapping does what it does in one process, bit for bit.

A row is a model, its data, and operations one after the other; after each, the oracle of
helpers/random_sequences compares masks, values, reports and outputs. A new wrapping is a name in
WRAPPINGS, and a new operation a row: each is tested with all of the other kind, but for meshes in
FEW_ROWS; at last in any order.
"""

import math
import random
from dataclasses import replace
from itertools import product
from operator import itemgetter

import pytest

from helpers import wrappings
from helpers.models import DATA, DTYPES, EVEN, EVEN_HIDDEN, UNEVEN, fqns
from helpers.random_sequences.plans import FAMILIES, TIED_KINDS, Operation, Plan, do
from helpers.random_sequences.plans import global_l1 as l1
from helpers.random_sequences.run import assert_nothing_differs, run_together, shrunk
from helpers.sampling import THOROUGH, every

# Every kind, every number of ranks, uneven and empty shards, more and fewer ranks than rows.
WRAPPINGS = [
    "plain-1", "plain-2", "ddp-3", "fsdp1-3", "fsdp1_root-2", "fsdp1_flat-2", "fsdp1_hybrid-2x2",
    "fsdp2-1", "fsdp2-2", "fsdp2-4", "fsdp2_root-3", "fsdp2_dim1-3", "hsdp-2x2", "tp-2", "tp-3",
    "fsdp2_tp-2x2", "replicate-2", "fsdp2_replicate-2",
]  # fmt: skip
# Every row runs on another number of ranks of the same kind.
FEW_ROWS = ("plain-1", "fsdp2-1", "fsdp2-4", "tp-3")
if THOROUGH:
    WRAPPINGS = [*wrappings.MATRIX, *wrappings.FSDP2_DIM1]
WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
NAMES = ["l2.weight", "l1.weight", "l1.bias", "l3.weight", "l3.bias"]
EVERYTHING = [*WEIGHTS, "l1.bias", "l2.bias", "l3.bias"]


def random_masks(amount, names, low=None, high=None) -> Operation:
    given = {"names": names, "low": low, "high": high}
    return do("global_random", amount=amount, seed=7, **given)


def scores(data: str, names: list, dtype: str = "float32", **where) -> dict:
    return {"names": names, "data": data, "dtype": dtype, "seed": 2, **where}


def shuffled(family: str, sizes: tuple, seed: int) -> list[str]:
    names = fqns(FAMILIES[family](sizes))
    return random.Random(seed).sample(names, len(names))


def amounts(number: int, sizes: tuple, step: int) -> list[tuple]:
    """Any data and dtype, and any amounts one after the other."""
    shapes = shuffled("shapes", sizes, number)
    size = sum(p.numel() for p in FAMILIES["shapes"](sizes).parameters())
    rounds = [(0.1, 0.9), (0.5, 0.5), (7, 0.5), (0, 0.0, 1, 0.9, 1.0, 0), (1.0, 0.5), (size,)]
    rows = []
    for turn, data in enumerate(DATA, number):
        dtypes = DTYPES if THOROUGH else [DTYPES[turn % len(DTYPES)]]
        chosen = rounds[(turn + number) % len(rounds)]
        rows += [("shapes", data, dtype, [l1(each, shapes) for each in chosen]) for dtype in dtypes]
    return every(step, rows, number)


def ranked_globally(number: int) -> list[tuple]:
    """Floors and ceilings, scores of all kinds, random scores, values that have changed."""
    low = {"l2.weight": 0.5, "l3.weight": 0.8}
    high = {"l1.weight": 0.3, "l1.bias": 0.0, "l3.bias": 0.34}
    bounds = [
        [l1(40, low=0.2, high=0.6), l1(30, low=0.2, high=0.6)],
        [l1(68, low=0.0, high=0.5)],  # all that the ceilings leave
        [
            l1(
                k,
                low={"l2.weight": 0.5, "l3.weight": 0.8},
                high={"l1.weight": 0.3, "l3.bias": 0.34},
            )
            for k in (60, 12)
        ],
        [
            l1(k, low={"l1.weight": 0.9, "l1.bias": 0.3, "l3.bias": 0.5}, high={"l2.weight": 0.05})
            for k in (80, 10, 0)
        ],
    ]
    given = [
        l1(0.3, scores=scores("few", ["l1.weight", "l3.bias"])),
        l1(10, scores=scores("normal", WEIGHTS, "float64")),
        l1(10, scores=scores("normal", WEIGHTS, "int64")),
        l1(10, scores=scores("tiny", ["l1.weight"], "float64")),  # float32 would round it to 0
        l1(0.5, scores=scores("few", ["l1.weight", "l3.bias"], sharded=True)),
    ]
    drawn = [random_masks(0.2, EVERYTHING), random_masks(60, EVERYTHING, low, high)]
    again = [l1(0.4), do("set_values", data="rounded", seed=3), l1(0.4)]
    data = ["normal", "few"][number % 2]
    return [
        *(("net", data, "float32", operations) for operations in every(2, bounds, number)),
        ("net", "normal", "float32", given),
        ("net", "normal", "bfloat16", drawn),
        ("net", "normal", "float32", again),
    ]


def single(number: int) -> list[tuple]:
    """The functions for one parameter."""
    amounts = [0, 1, 0.3, 0.5, 1.0, 60]
    magnitudes = [
        do("single_l1", name=name, amount=amounts[(i + number) % 5])
        for i, name in enumerate(EVERYTHING)
    ]
    norms = [
        do("norm_channels", name=WEIGHTS[i % 3], n=n, dim=dim, amount=amount)
        for i, (n, dim, amount) in enumerate(product((1, 2, math.inf), (0, 1, -1), (1, 0.5)))
    ]
    masks = [
        do("custom", name=name, share=0.7, dtype=dtype, seed=seed)
        for name, dtype, seed in [("l1.weight", "bool", 3), ("l2.weight", "int64", 4)]
    ]
    drawn = [
        *(do("single_random", name="l1.weight", amount=a, seed=number) for a in (0, 1, 0.25, 5)),
        do("random_channels", name="l1.weight", amount=0.5, dim=0, seed=5),
        do("random_channels", name="l2.weight", amount=3, dim=1, seed=5),
        do("single_random", name="l3.weight", amount=1.0, seed=5),
    ]
    mixed = [
        do("identity", name="l2.weight"),
        *magnitudes[1:3],
        *masks,
        *norms[number % 2 :: 6],
        do("remove", name="l1.weight"),
        do("remove", name="l1.weight"),  # which is refused
        do("remove_all"),
    ]
    data = ["normal", "few", "equal"][number % 3]  # sums of few are exact, so ties are true
    return [
        ("net", ["normal", "few"][number % 2], ["float32", "bfloat16"][number % 2], magnitudes),
        ("net", data, "float32", norms if THOROUGH else norms[number % 3 :: 3]),
        ("net", "normal", "float32", drawn),
        ("net", "normal", "float32", mixed),
    ]


def segments(number: int, family: str, sizes: tuple) -> list[tuple]:
    """Rows, layers and N:M of weights whose inputs lie along any dimension."""
    names = fqns(FAMILIES[family](sizes))

    def of(scope: str, amount: float) -> Operation:
        return do("segments", names=names, scope=scope, amount=amount)

    def pattern(text: str) -> Operation:
        return do("pattern", pattern=text)

    rows = [
        (family, "few", "float32", [of("row", 0.3), of("row", 0.5), pattern("2:4")]),
        (family, "normal", "bfloat16", [of("row", 0.75)]),
        (family, "few", "float64", [of("layer", 0.35), of("row", 0.5)]),
        (family, "equal", "float32", [pattern("2:4")]),
        (family, "few", "mixed", [pattern("2:3"), pattern("1:4")]),
        (family, "zeros", "float16", [of("layer", 0.5), pattern("1:2")]),
    ]
    return every(2, rows, number)


def chosen_masks(number: int) -> list[tuple]:
    """Methods of the user's, masks that are selected, replaced, and read from zeros."""

    def own(names, limit=None, amount=None) -> Operation:
        return do("own_method", names=names, limit=limit, amount=amount)

    def select(names, k, largest=True, share=None) -> Operation:
        return do("global_mask", names=names, k=k, largest=largest, share=share, seed=2)

    size = {name: p.numel() for name, p in FAMILIES["net"](UNEVEN).named_parameters()}
    total = sum(size[name] for name in EVERYTHING)
    selections = [
        *(select(EVERYTHING, k) for k in (0, total // 3, total // 3 + 1)),
        select(EVERYTHING, total // 4, True, 0.7),
        select(EVERYTHING, total // 4, False, 0.7),
        select(EVERYTHING, 60, False),  # by random scores
        select(EVERYTHING, total + 1000),  # refused
        l1(0.3),
        select(NAMES, 20),
    ]
    data = ["rounded", "equal", "few"][number % 3]
    elementwise = [own(NAMES, limit=0.9), own(NAMES, limit=0.5), own(WEIGHTS[:1], limit=1.0)]
    signed = [own(NAMES, amount=0.3), own(NAMES, amount=20), own(["l3.weight"], amount=0.5)]
    zeros = [l1(0.1), *[do("masks_from_zeros", names=NAMES)] * 2]
    return [
        ("net", "rounded", "float32", elementwise),
        ("net", "rounded", "float32", signed),
        ("net", data, ["float32", "bfloat16", "float16"][number % 3], selections),
        ("net", "zeros", "float32", zeros),
    ]


def life(number: int, sizes: tuple, wrapping: str) -> list[tuple]:
    """What a model goes through; with training, so of sizes that torch can run."""

    def masks(share: float, with_optimizer: bool) -> Operation:
        names = WEIGHTS[:2] if share == 0.4 else WEIGHTS
        seed = 4 + with_optimizer  # of whole masks, and of shards
        arguments = {"share": share, "with_optimizer": with_optimizer, "seed": seed}
        return do("set_masks", True, names=names, **arguments)

    train, look = do("train", seed=5), do("evaluate", seed=6, inference=True)
    load = do("load_rewrapped", True, wrapping=wrapping, pruned=[], unmasked="error", seed=8)
    replaced = [masks(0.5, False), train, masks(0.4, True), train, load, masks(0.6, False), train]
    zeros = [do("masks_from_zeros", names=WEIGHTS), train, do("copied"), do("remove_all", True)]
    # Of dense weights into a model that is pruned: refused, and then with leave.
    given = {"wrapping": wrapping, "pruned": WEIGHTS[:1], "seed": 9}
    zeros += [do("load_rewrapped", True, unmasked=how, **given) for how in ("error", "keep")]
    wrapped = [l1(0.5), do("wrap_pruned", True, wrapping=wrapping), train, look, l1(0.3)]
    wrapped += [do("remove", True, name=name) for name in WEIGHTS]
    states = [l1(0.5, look=True), look, train, do("state_dict"), do("schedule"), train, look]
    return [
        ("net", "normal", "float32", replaced, sizes),
        ("net", "zeros", "float32", zeros, sizes),
        ("net", "normal", "float32", wrapped, sizes),
        ("net", "few", "bfloat16", states, sizes),
    ]


def tied(wrapping: str) -> list[tuple]:
    """Two embeddings with one weight, which one unit of a wrapper holds."""
    names = ["embedding.weight", "hidden.weight"]
    train = do("train", seed=5)
    wrapped = [l1(20, names), do("wrap_pruned", True, wrapping=wrapping), train]
    removed = [do("remove", True, name=name) for name in names]
    pruned = [l1(20, names, look=True), train, l1(0.3, names), do("schedule"), *removed]
    return [("tied", "normal", "float32", pruned), ("tied", "normal", "float32", wrapped + removed)]


def others(wrapping: str, uneven: tuple) -> list[tuple]:
    """Convolutions that are trained; what FSDP2 refuses: channels last, and no dimension."""
    names = ["head.weight", "conv.weight", "norm.weight"]
    train = do("train", seed=5)
    channels = do("norm_channels", True, name="conv.weight", n=2, dim=0, amount=1)
    rows = []
    if wrappings.kind_of(wrapping) not in ("tp", "fsdp2_tp", "fsdp2_dim1", "fsdp2_replicate"):
        conv = [l1(0.3, names), train, channels, train, do("remove_all", True)]
        rows.append(("conv", "normal", "float32", conv))
    if wrappings.kind_of(wrapping).startswith(("plain", "ddp", "fsdp1")):
        sharded = scores("few", names[:2], sharded=True)
        last = [l1(0.3, names, sharded), train, l1(9, names), channels, do("remove_all")]
        rows.append(("channels last", "normal", "float32", last))
    if wrappings.kind_of(wrapping) in ("plain", "ddp"):
        scale = [l1(10, ["scale.weight", "l1.weight", "scale.bias"]), train]
        scale += [do("single_l1", True, name="scale.weight", amount=1), train]
        rows.append(("scale", "normal", "float32", [*scale, do("remove_all")], uneven))
    return rows


def plans_of(wrapping: str) -> list[Plan]:
    """The rows of a wrapping; the number of it chooses among data, dtypes and cases."""
    number, kind = WRAPPINGS.index(wrapping), wrappings.kind_of(wrapping)
    step = 1 if wrappings.world_size(wrapping) < 3 else 2  # many ranks are dear
    uneven = EVEN if kind == "fsdp2_dim1" else UNEVEN
    # torch puts convolutions and experts of these into other units than the layers of a Net.
    family = "net" if kind == "fsdp2_dim1" else "shapes" if kind == "fsdp1_flat" else "groups"
    rows = [
        *([] if kind == "fsdp2_dim1" else amounts(number, uneven, step)),
        *ranked_globally(number),
        *single(number),
        # Where replicas hold parts of rows, few values hide a row that is sent twice.
        *(row + (EVEN,) for row in segments(1 if "hybrid" in kind else number, family, EVEN)),
        *chosen_masks(number),
        *life(number, wrappings.runnable_sizes(wrapping), wrapping),
        *(tied(wrapping) if kind in TIED_KINDS else []),
        *others(wrapping, uneven),
    ]
    plans, step = [], 3 if wrapping in FEW_ROWS else 1
    numbered = every(step, enumerate(rows), number)
    for seed, (family, data, dtype, operations, *sizes) in numbered:
        is_one_unit = kind == "fsdp1_root" or (kind.startswith("fsdp1") and family == "groups")
        if dtype == "mixed" and is_one_unit:  # a flat parameter has one dtype
            dtype = "float32"
        optimizer = ["adamw", "sgd"][(number + seed) % 2]
        sizes = sizes[0] if sizes else uneven
        plans.append(Plan(seed, family, sizes, dtype, data, wrapping, optimizer, tuple(operations)))
    return plans


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_operation_is_that_of_one_process(wrapping):
    assert_nothing_differs(plans_of(wrapping))


@pytest.mark.parametrize(
    "wrapping", ["fsdp2_tp-4x2", *(["fsdp2_tp-3x2", "fsdp2_tp-2x3"] if THOROUGH else [])]
)
def test_nested_uneven_shards(wrapping):
    """Splits where torch's own offsets and full_tensor() are wrong (9 rows on 4x2)."""
    operations = (l1(0.3, EVERYTHING), l1(0.5, EVERYTHING))
    plan = Plan(0, "net", UNEVEN, "bfloat16", "equal", wrapping, "sgd", operations)
    assert_nothing_differs([replace(plan, sizes=(6, rows, 5, 3)) for rows in (1, 9, 11)])


# The operations of test_operations.py in any order, on 1 to 3 ranks, beside one process.


# Batches of sequences that share a world size, and a process group.
WORLD_SIZES = (2, 3, 1, 2, 3) * 4 if THOROUGH else (2, 3)
NUM_SEQUENCES = 25 if THOROUGH else 5
WRAPPINGS_OF_SEQUENCES = [*wrappings.TRAINED, *wrappings.FSDP2_DIM1]


def draw(seed: int, world_size: int) -> Plan:
    chosen = random.Random(seed)
    sizes = chosen.choice([UNEVEN, EVEN_HIDDEN, EVEN])
    possible = (sizes, UNEVEN) if sizes == EVEN_HIDDEN else (UNEVEN, EVEN_HIDDEN, EVEN)
    fitting = [
        name
        for name in WRAPPINGS_OF_SEQUENCES
        if wrappings.world_size(name) == world_size
        and wrappings.runnable_sizes(name) in ([UNEVEN] if sizes == UNEVEN else possible)
    ]
    family, number = chosen.choice(["net", "norm"]), chosen.randrange(100)
    rows = [
        *ranked_globally(number), *single(number), *segments(number, family, sizes),
        *chosen_masks(number), *life(number, sizes, chosen.choice(fitting)),
    ]  # fmt: skip
    pool = [operation for operations in map(itemgetter(3), rows) for operation in operations]
    data, dtype = chosen.choice(DATA[:-1]), chosen.choice(["float32", "bfloat16", "float64"])
    operations = chosen.sample(pool, chosen.randint(4, 12))
    optimizer = chosen.choice(["adamw", "sgd"])
    made = family, sizes, dtype, data, chosen.choice(fitting), optimizer
    return Plan(seed, *made, tuple(operations))


@pytest.mark.slow
@pytest.mark.timeout(2000)  # a batch that hangs is run again, one by one
@pytest.mark.parametrize("number", range(len(WORLD_SIZES)))
def test_every_operation_does_what_it_does_in_one_process(number):
    seeds = range(number * NUM_SEQUENCES, (number + 1) * NUM_SEQUENCES)
    outcomes = run_together([draw(seed, WORLD_SIZES[number]) for seed in seeds])
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    assert not wrong, f"{len(wrong)} differ, among them {shrunk(wrong[0])}"[:10000]
    assert sum(outcome.operations.total() for outcome in outcomes) >= 4 * len(outcomes)
