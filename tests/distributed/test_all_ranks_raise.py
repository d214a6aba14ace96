"""One rank differs, or asks for what is not possible: all ranks raise the same, nothing changes.

A row is what happens to the call of the odd rank, and the error. All rows of a wrapping run in one
start of its ranks, with the first rank as the odd one, with the last one, or with all of them.
"""

import gc
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distprune as prune
from distprune.base.naming import unwrap
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import (
    assert_nothing_wrong,
    assert_nothing_wrong_on,
    other_errors,
    outcome,
    wrong_masks,
)
from helpers.models import EVEN, Net, fill, seeded, target
from helpers.sampling import every

NAMES = ["l1.weight", "l2.weight", "l2.bias", "l3.weight"]
SECONDS = 100  # to agree on the errors of all rows; a rank that is left alone would wait for ever
COLLIDING = ([0, 4, 5], [1, 2, 6])  # with equal sums of i and of i * i
REST = "[^;]*"  # of what is said about a parameter


class Undeclared(prune.BasePruningMethod):
    """A method that says nothing about shards."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount=0.5):
        self.amount = amount

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() >= 0.5)


class Colliding(Undeclared):
    """Leaves out three elements: others on each replica, with equal checksums of a simple kind."""

    def compute_mask(self, t, default_mask):
        return default_mask * colliding_mask(t.shape, dist.get_rank() % 2)


class AsRank(Undeclared):
    DISTRIBUTED = "elementwise"

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() >= dist.get_rank())


class ScoresOfRank(Undeclared):
    DISTRIBUTED = "scores"

    def compute_scores(self, t):
        return t * (1 - 2 * dist.get_rank())


class WrongShape(AsRank):
    def compute_mask(self, t, default_mask):
        return torch.ones(7)


class Above(AsRank):
    """Keeps what is above the first of some limits."""

    def __init__(self, limits, amount=None):
        self.limits = limits

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() > float(next(iter(self.limits))))


class Damped(prune.L1Unstructured):
    """What is pruned keeps a tenth."""

    def apply_mask(self, module):
        mask = getattr(module, self._tensor_name + "_mask")
        return getattr(module, self._tensor_name + "_orig") * (mask + 0.1 * (1 - mask))


class Fails(AsRank):
    def __init__(self, amount, is_odd=False):
        self.is_odd = is_odd

    def compute_mask(self, t, default_mask):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("this rank cannot")
        return default_mask


def colliding_mask(shape, which: int) -> torch.Tensor:
    mask = torch.ones(shape)
    mask.view(-1)[COLLIDING[which]] = 0
    return mask


@cache
def indices_of(wrapping: str, rank: int) -> dict[str, torch.Tensor]:
    return wrappings.local_indices(seeded(Net()), wrapping)


class Setting:
    """A wrapped model, and whether this rank is the odd one."""

    def __init__(self, wrapping: str, odd_rank: int | None):
        self.indices = indices_of(wrapping, dist.get_rank())
        self.model = net(wrapping)
        self.is_odd = odd_rank in (dist.get_rank(), None)
        self.pairs = [self.pair(name) for name in NAMES]

    def pair(self, name: str):
        module, leaf = target(wrappings.unwrapped(self.model), name)
        return unwrap(module), leaf

    def usual(self, odd, usual):
        return odd if self.is_odd else usual


def calling(function=prune.global_unstructured, usual=(), **odd):
    """A row: the odd rank passes other arguments; one that is called is made from the setting."""

    def prepare(setting: Setting):
        is_global = function is prune.global_unstructured
        first = [setting.pairs] if is_global else list(setting.pairs[0])
        arguments = {"pruning_method": prune.L1Unstructured} if is_global else {}
        arguments |= {"amount": 0.5, **dict(usual)}
        for name, value in odd.items() if setting.is_odd else ():
            value = value(setting) if callable(value) and not isinstance(value, type) else value
            if name == "parameters":
                first = [value]
            elif value is missing:
                del arguments[name]
            else:
                arguments[name] = value
        return partial(function, *first, **arguments)

    return prepare


missing = "left out"


def after(change, **arguments):
    """A row: what happens to the model before the call."""

    def prepare(setting: Setting):
        with torch.no_grad():
            change(setting)
        return calling(**arguments)(setting)

    return prepare


def name_in_the_way(setting: Setting) -> None:
    if setting.is_odd:
        setting.pairs[3][0].weight_mask = "an attribute of the user's own"


def nan(setting: Setting) -> None:
    if setting.is_odd:
        wrappings.shard(setting.model, NAMES[1], setting.indices)[:1] = torch.nan


def replica_in_another_order(setting: Setting, shift: int) -> None:
    """The same numbers, in another order."""
    if setting.is_odd:
        weight = wrappings.shard(setting.model, NAMES[0], setting.indices)
        weight.copy_(weight.flatten().roll(shift).view_as(weight))


def replica_of_the_mask(setting: Setting, shift: int) -> None:
    mask = (torch.arange(60) ** 2 % 7 > 2).view(10, 6)  # no roll by less than 7 maps it to itself
    prune.custom_from_mask(*setting.pairs[0], mask.roll(setting.usual(shift, 0)))


def another_model(setting: Setting, sizes=(6, 10, 5, 3), dtype="float32") -> None:
    if setting.is_odd:
        setting.model = fill(Net(sizes), "normal", dtype)
        setting.pairs = [setting.pair(name) for name in NAMES]


def own_mask(setting: Setting):
    """custom_from_mask with a whole mask that one rank has otherwise."""
    mask = colliding_mask((10, 6), int(setting.is_odd))
    return partial(prune.custom_from_mask, *setting.pairs[0], mask)


def factor(value: float):
    """A row: custom_from_mask with this value in the mask of the odd rank, and zero in others."""

    def prepare(setting: Setting):
        mask = torch.ones(10, 6)
        mask[0, 0], mask[-1, -1] = 0, setting.usual(value, 0)
        return partial(prune.custom_from_mask, *setting.pairs[0], mask)

    return prepare


def global_mask(**odd):
    def prepare(setting: Setting):
        pairs = [setting.pair(name) for name in NAMES]
        arguments = {"k": 20} | (odd if setting.is_odd else {})
        if arguments.pop("others", None):
            pairs[0], pairs[1] = pairs[1], pairs[0]
        return partial(prune.global_mask, pairs, **arguments)

    return prepare


def set_masks(change=None, options=None):
    def prepare(setting: Setting):
        generator = torch.Generator().manual_seed(3)
        shapes = [getattr(Net().get_submodule(n[:2]), n[3:]).shape for n in NAMES]
        masks = [torch.rand(shape, generator=generator) < 0.5 for shape in shapes]
        if change and setting.is_odd:
            change(masks)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        given = {"optimizer": optimizer} if options and setting.is_odd else {}
        return partial(prune.set_masks, setting.pairs, masks, **given)

    return prepare


def scored(key, value=None):
    """A row: importance scores under this key, which is made from the setting."""

    def scores(setting: Setting) -> dict:
        made = key(setting) if callable(key) else key
        return {setting.pairs[1]: torch.ones(5, 10), made: value or torch.ones(5, 10)}

    return calling(importance_scores=scores)


def structured(setting: Setting):
    return partial(prune.random_structured, *setting.pairs[0], setting.usual(4, 3), 0)


def differ(fact: str, usual: str, odd: str) -> str:
    """What the text says of a fact in which one rank differs: expressions for both values."""
    orders = [rf"{one}; rank \d has {fact}: {other}" for one, other in ((usual, odd), (odd, usual))]
    return (
        "^the ranks were called with different arguments: "
        rf"rank 0 has {fact}: ({'|'.join(orders)})\. Expected the same parameters"
    )


def on_rank(text: str) -> str:
    return rf"^on rank \d: {text}"


@dataclass
class Row:
    """What is called, the error on every rank, and the wrappings of the row; () for all."""

    prepare: object
    text: str
    kind: str = "ValueError"
    on: tuple[str, ...] = ()
    odd: tuple = field(default=("first", "last"))


ALL = ("all",)  # ranks make the same mistake
SHARDED = ("fsdp2-3", "tp-2", "fsdp2_root-2")
REPLICAS = ("plain-2", "ddp-3", "hsdp-2x2")
ONE = ("fsdp2-3", "tp-2", "hsdp-2x2", "fsdp2_tp-2x2")  # one parameter is collective there
WHOLE = ("fsdp1-2", "fsdp2-3", "tp-2")  # whole masks and scores are sliced by each rank
NOT_NUMBERS = r"the scores of \w*Linear\.weight \(#1\) \([1-9]\d* of 50\) are NaN; expected numbers"
REPLICAS_DIFFER = r"the ranks hold replicas of this parameter \(or of its scores or mask\) that"
PARAMETER = r"\w*Linear\.weight \(#{}\)"
single = partial(calling, prune.l1_unstructured)
bounded = partial(calling, usual={"amount": 50, "min_sparsity": 0.2, "max_sparsity": 0.6})

ROWS = {
    "amount": Row(calling(amount=0.4), differ("amount", r"0\.5", r"0\.4")),
    "amount of another type": Row(
        calling(usual={"amount": 1.0}, amount=1), differ("amount", r"1\.0", "1"),
    ),
    "amount out of range": Row(
        calling(amount=-0.1), on_rank(r"amount=-0\.1 is not in \[0, 1\]; expected"),
    ),
    "amount missing": Row(
        calling(amount=missing), on_rank(r"\w+\.__init__\(\) missing .* 'amount'"), "TypeError",
    ),
    "unknown argument": Row(
        calling(amuont=0.5), on_rank(r"\w+\.__init__\(\) got an unexpected .*'amuont'"),
        "TypeError",
    ),
    "method": Row(
        calling(pruning_method=prune.RandomUnstructured),
        differ("pruning method", r"\S+\.L1Unstructured", r"\S+\.RandomUnstructured"),
    ),
    "structured method": Row(
        calling(pruning_method=prune.LnStructured),
        on_rank(r"LnStructured\.__init__\(\) missing .* 'n'"), "TypeError",
    ),
    "fewer parameters": Row(
        calling(parameters=lambda s: s.pairs[:-1]), differ("number of parameters", "4", "3"),
    ),
    "no parameters": Row(
        calling(parameters=lambda s: []), on_rank("parameters is empty; expected at"),
    ),
    "order": Row(
        calling(parameters=lambda s: s.pairs[::-1]),
        differ(PARAMETER.format(0), rf"shape \(10, 6\){REST}", rf"shape \(3, 5\){REST}"),
    ),
    "another parameter": Row(
        calling(parameters=lambda s: [*s.pairs[:2], (s.pairs[3][0], "bias"), s.pairs[3]]),
        differ(r"\w*Linear\.bias \(#2\)", rf"shape \(5,\){REST}", rf"shape \(3,\){REST}"),
    ),
    "missing attribute": Row(
        calling(parameters=lambda s: [s.pairs[0], (s.pairs[1][0], "weigth")]),
        on_rank(r"'\w*Linear' object has no .* 'weigth'"), "AttributeError",
    ),
    "scores": Row(
        calling(importance_scores=lambda s: {s.pairs[0]: torch.ones(10, 6)}),
        differ(PARAMETER.format(0), rf"{REST}, importance scores: none",
               rf"{REST}, importance scores: torch\.float32, checksum {REST}"),
    ),
    "scores of another shape": Row(
        calling(importance_scores=lambda s: {s.pairs[0]: torch.ones(10, 7)}),
        on_rank(PARAMETER.format(0) + r": importance_scores has shape \(10, 7\); expected"),
    ),
    "scores are no dict": Row(
        calling(importance_scores=lambda s: [torch.ones(10, 6)]),
        on_rank("importance_scores is a list; expected a dict"), "TypeError",
    ),
    "whole scores that differ": Row(
        calling(usual={"importance_scores": None},
                importance_scores=lambda s: {s.pairs[0]: torch.ones(10, 6) + torch.eye(10, 6)}),
        "scores", on=WHOLE,
    ),
    "name in the way": Row(
        after(name_in_the_way),
        on_rank(r".*\w*Linear has an attribute .*'weight_mask.*' already; expected none")[1:],
        "KeyError",
    ),
    # NaN in one replica, in one shard, and everywhere; a replica with other values.
    "NaN in a replica": Row(after(nan), REPLICAS_DIFFER, on=REPLICAS),
    "NaN in a shard": Row(after(nan), NOT_NUMBERS, on=SHARDED),
    "NaN everywhere": Row(after(nan), NOT_NUMBERS, odd=ALL),
    **{
        f"{what} rolled by {shift}": Row(
            after(partial(change, shift=shift)), PARAMETER.format(0) + ": " + REPLICAS_DIFFER,
            on=("plain-2", "ddp-3", *(("hsdp-2x1", "hsdp-2x2") if what == "values" else ())),
        )
        for what, change in (("values", replica_in_another_order), ("mask", replica_of_the_mask))
        for shift in (1, 2, 6)
    },
    "a whole mask of one parameter": Row(own_mask, "mask", on=(*ONE, "fsdp1-2")),
    # Plain modules multiply with masks of any values, as in torch; shards cannot.
    **{
        f"a mask with {value:g}": Row(
            factor(value), rf"Linear\.weight(.|\n)*{value:g}(.|\n)*0 and 1", on=(*ONE, "fsdp1-2"),
            odd=("first", "last", "all"),
        )
        for value in (0.5, -1.0, 2.0)
    },
    "a method's own apply_mask": Row(
        lambda s: partial(Damped.apply, *s.pairs[0], 0.5),
        "the apply_mask of Damped acts neither on shards", "NotImplementedError",
        on=(*ONE, "fsdp1-2"), odd=ALL,
    ),
    "dtype": Row(
        after(partial(another_model, dtype="float64")),
        differ(PARAMETER.format(0), rf"{REST}float32, {REST}", rf"{REST}float64, {REST}"),
        on=("plain-2",),
    ),
    "shape": Row(
        after(partial(another_model, sizes=(6, 10, 7, 3))),
        differ(PARAMETER.format(1), rf"shape \(5, 10\), {REST}", rf"shape \(7, 10\), {REST}"),
        on=("plain-2",),
    ),
    # One parameter, on the ranks of its mesh.
    "one, amount": Row(single(amount=0.4), differ("amount", r"0\.5", r"0\.4"), on=ONE),
    "one, type": Row(single(amount=1), differ("amount", r"0\.5", "1"), on=ONE),
    "one, negative": Row(
        single(amount=-1), on_rank("amount=-1 is negative; expected a count"), on=ONE,
    ),
    "one, above one": Row(
        single(amount=2.5), on_rank(r"amount=2\.5 is not in \[0, 1\]; expected"), on=ONE,
    ),
    "one, channels": Row(structured, differ("amount", "3", "4"), on=ONE),
    "one, norm": Row(
        lambda s: partial(prune.ln_structured, *s.pairs[0], 0.5, "fro", 0), "n='fro'",
        "NotImplementedError", on=ONE, odd=ALL,
    ),
    # Floors and ceilings.
    "floor": Row(bounded(min_sparsity=0.25), "segments of .* pruned elements"),
    "ceiling": Row(bounded(max_sparsity=lambda s: {s.pairs[0]: 0.5}), "segments of .* pruned el"),
    "no bounds": Row(bounded(min_sparsity=None, max_sparsity=None), "what divides the amount"),
    "NaN as a bound": Row(bounded(max_sparsity=float("nan")), "max_sparsity=nan"),
    "text as a bound": Row(bounded(min_sparsity="0.2"), "min_sparsity='0.2'", "TypeError"),
    "bound of nothing": Row(bounded(min_sparsity={"l9": 0.2}), "l9"),
    # Scores under a key that stands for no parameter would be ignored.
    "misspelt": Row(scored(lambda s: (s.pairs[0][0], "weigth")), r"Linear, 'weigth'"),
    "another module": Row(
        scored(lambda s: (torch.nn.Linear(5, 10), "weight")), r"Linear, 'weight'\)",
    ),
    "not in the list": Row(scored(lambda s: (s.pairs[0][0], "bias")), r"Linear, 'bias'"),
    "full name": Row(scored("l1.wieght"), r"'l1\.wieght'(.|\n)*\(module, name\)", "TypeError"),
    "name of two letters": Row(scored("l1"), r"'l1'(.|\n)*\(module, name\)", "TypeError"),
    "a number": Row(scored(7), r"7(.|\n)*\(module, name\)", "TypeError"),
    # Methods of the user's.
    "undeclared on shards": Row(
        calling(pruning_method=Undeclared),
        "Undeclared(.|\n)*elementwise(.|\n)*scores|Undeclared(.|\n)*scores(.|\n)*elementwise",
        "NotImplementedError", on=(*SHARDED, "hsdp-2x2"), odd=ALL,
    ),
    "undeclared, of one": Row(
        lambda s: partial(Undeclared.apply, *s.pairs[0]), "Undeclared", "NotImplementedError",
        on=ONE, odd=ALL,
    ),
    "undeclared, replicas": Row(
        calling(pruning_method=Colliding), "mask", on=("plain-2", "ddp-3"), odd=ALL,
    ),
    "of the rank": Row(calling(pruning_method=AsRank), "mask", on=REPLICAS, odd=ALL),
    "scores of the rank": Row(calling(pruning_method=ScoresOfRank), "mask", on=REPLICAS, odd=ALL),
    **{
        f"limits in a {type(limits(0)).__name__}": Row(
            calling(usual={"pruning_method": Above, "limits": limits(0.1)},
                    limits=lambda s, limits=limits: limits(0.2)),
            "limits",
        )
        for limits in (
            lambda x: [x], lambda x: {x: None}, lambda x: torch.tensor([x]), lambda x: ([[x]],)
        )
    },
    "fails on one rank": Row(
        calling(pruning_method=Fails), "this rank cannot", "RuntimeError", odd=ALL,
    ),
    "fails on one rank, of one": Row(
        lambda s: partial(Fails.apply, *s.pairs[0], amount=1), "this rank cannot", "RuntimeError",
        on=ONE, odd=ALL,
    ),
    "mask of another shape": Row(
        calling(pruning_method=WrongShape), "shape", "RuntimeError", odd=ALL,
    ),
    "norm of order 0": Row(
        lambda s: partial(prune.ln_structured, *s.pairs[0], 0.5, 0, 0),
        "n=0 of torch.float32 is not supported", "NotImplementedError", on=SHARDED, odd=ALL,
    ),
    # global_mask and set_masks.
    "global_mask, k": Row(global_mask(k=21), "k:"),
    "global_mask, largest": Row(global_mask(largest=False), "largest"),
    "global_mask, candidates": Row(global_mask(candidates=[None] * 4), "candidates"),
    "global_mask, too many": Row(global_mask(k=10**6), "k is 1,000,000, and", odd=ALL),
    "global_mask, NaN": Row(
        lambda s: (after(nan)(s), global_mask()(s))[1], r"weight \(#1\)(.|\n)*NaN", on=SHARDED,
    ),
    "global_mask, parameters": Row(global_mask(others=True), r"Linear\.weight"),
    "set_masks, differ": Row(set_masks(lambda masks: masks[1].logical_not_()), r"Linear\.weight"),
    "set_masks, missing": Row(
        set_masks(lambda m: m.__setitem__(1, None)), r"masks\[1\] is a NoneType", "TypeError",
    ),
    "set_masks, shape": Row(
        set_masks(lambda m: m.__setitem__(1, m[1][:2])), r"has shape \(2, ", odd=ALL,
    ),
    "set_masks, values": Row(
        set_masks(lambda m: m.__setitem__(1, m[1] * 0.5)), "the value 0.5", odd=ALL,
    ),
    "set_masks, list": Row(set_masks(list.pop), "3 masks for 4 parameters"),
    "set_masks, one optimizer": Row(set_masks(options=True), "an optimizer is given"),
    "set_masks, another optimizer": Row(
        set_masks(options=True), "none of the optimizer's parameters", odd=ALL,
    ),
}  # fmt: skip


@wrappings.sharing_meshes
def outcomes(wrapping: str, rows: list[tuple[str, str]]) -> list[tuple]:
    """What this rank sees of each row, with one rank as the odd one."""
    odd_ranks = {"first": 0, "last": dist.get_world_size() - 1, "all": None}
    found = []
    for name, odd in rows:
        setting = Setting(wrapping, odd_ranks[odd])
        call = ROWS[name].prepare(setting)
        found.append(outcome(setting.model, call))
    return found


def rows_of(wrapping: str, rows: dict[str, Row]) -> list[tuple[str, str]]:
    fitting = [name for name, row in rows.items() if not row.on or wrapping in row.on]
    return [(name, odd) for name in fitting for odd in rows[name].odd]


@pytest.mark.whole
@pytest.mark.parametrize(
    "wrapping", ["plain-2", "fsdp2-3", "ddp-3", "tp-2", "hsdp-2x2", "fsdp1-2", "fsdp2_tp-2x2"]
)
def test_all_ranks_raise_the_same(wrapping):
    rows = rows_of(wrapping, ROWS)
    if wrapping not in ("plain-2", "fsdp2-3"):  # what no layout changes is tried there in full
        own = {name: row for name, row in ROWS.items() if wrapping in row.on}
        others = {name: row for name, row in ROWS.items() if not row.on}
        rows = rows_of(wrapping, own) + every(4, rows_of(wrapping, others), len(wrapping))
    size = wrappings.world_size(wrapping)
    per_rank = run_ranks(outcomes, size, wrapping, rows, timeout=SECONDS)
    wrong = []
    for (name, odd), found in zip(rows, zip(*per_rank, strict=True), strict=True):
        wrong += other_errors(found, ROWS[name].kind, ROWS[name].text, f"{name} ({odd})")
    assert not wrong, "\n".join(wrong)[:5000]


@torch.no_grad()
def differences_with_pruned_nan(wrapping: str) -> list[str]:
    """NaN wherever the first pruning has put the mask to 0 is no error."""
    setting, dense = Setting(wrapping, None), seeded(Net())
    scores = [dense.get_parameter(name) for name in NAMES]
    prune.global_unstructured(setting.pairs, prune.L1Unstructured, amount=0.5)
    for module, name in setting.pairs:
        mask, orig = getattr(module, name + "_mask"), wrappings.stored(module, name)
        wrappings.local(orig)[wrappings.local(mask) == 0] = torch.nan
    prune.global_unstructured(setting.pairs, prune.L1Unstructured, amount=0.5)
    keeps = reference.prune(scores, 0.5, reference.prune(scores, 0.5))
    return wrong_masks(setting.model, dict(zip(NAMES, keeps, strict=True)), setting.indices)


@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-3", "fsdp2_tp-2x2"])
def test_nan_among_the_pruned_elements_is_no_error(wrapping):
    assert_nothing_wrong_on(wrapping, differences_with_pruned_nan)


# Replicas that differ are detected, however their differences are arranged.


def prune_all(model: nn.Module, **arguments) -> None:
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5, **arguments)


def not_refused(model: nn.Module, text: str, **arguments) -> list[str]:
    found = outcome(model, lambda: prune_all(model, **arguments))
    return other_errors([found], "ValueError", text)


@torch.no_grad()
def wrong_with_opposite_differences(wrapping: str) -> list[str]:
    """Rank 1 has w + d and rank 2 has w - d, as integers of the bits."""
    model = net(wrapping)
    weight = wrappings.unwrapped(model).l1.weight
    weight.view(torch.int32)[0, 0] += (0, 1, -1)[dist.get_rank()]
    return not_refused(model, "replicas")


@pytest.mark.parametrize("wrapping", ["plain-3", "ddp-3"])
def test_opposite_differences(wrapping):
    assert_nothing_wrong_on(wrapping, wrong_with_opposite_differences)


@torch.no_grad()
def wrong_with_exchanged_shards(wrapping: str, what: str) -> list[str]:
    """The second replica of an HSDP model has the right numbers, on the wrong one of its ranks."""
    model = wrappings.wrap(seeded(Net(EVEN)), wrapping)
    if what != "values":
        prune.l1_unstructured(model.l1, "weight", 0.4)
    parameter = model.l1.weight
    local = wrappings.local(parameter if what == "values" else model.l1.weight_mask)
    shards = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(shards, local, group=parameter.device_mesh.get_group(1))
    is_second, place = divmod(dist.get_rank(), 2)
    if what == "two bits":  # at one place of both shards, of which one is set and one is not
        local.view(-1)[7] = place != is_second
    elif is_second:
        local.copy_(shards[1 - place])
    return not_refused(model, "replicas")


@pytest.mark.parametrize("what", ["values", "masks", "two bits"])
def test_a_replica_with_exchanged_shards(what):
    assert_nothing_wrong_on("hsdp-2x2", wrong_with_exchanged_shards, what)


@torch.no_grad()
def wrong_with_permuted_experts() -> list[str]:
    """Two experts of one name; the rows of one are those of the other in another order."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    expert = nn.ModuleDict({"expert": nn.Linear(8, 6, bias=False)})
    rows = torch.arange(48.0).view(6, 8) + 1
    expert["expert"].weight.copy_(rows if rank < 2 else torch.cat([rows[3:], rows[:3]]))
    fully_shard(expert["expert"], mesh=meshes[rank // 2])
    return not_refused(expert, "expert.weight", pipeline_parallel=True)


def test_experts_that_are_permutations_of_each_other():
    assert_nothing_wrong(run_ranks(wrong_with_permuted_experts, 4))


# What is not supported is refused by name, on every rank, before anything changes.


def net(wrapping: str, **options) -> nn.Module:
    return wrappings.wrap(seeded(Net()), wrapping, **options)


def prune_one(model: nn.Module) -> None:
    prune.l1_unstructured(wrappings.unwrapped(model).l1, "weight", 0.5)


# Each makes a model, and what is called with it.


def partial_placement(call):
    model = seeded(Net())
    weight, mesh = model.l1.weight.data, init_device_mesh("cpu", (2,))
    model.l1.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Partial()]))
    return model, call


def scores_on_other_placements():
    model = net("fsdp2-2")
    scores = distribute_tensor(torch.ones(10, 6), model.l1.weight.device_mesh, [Shard(1)])
    return model, partial(prune_all, importance_scores={(model.l1, "weight"): scores})


def fsdp1(case: str, use_orig_params: bool = True, single: bool = True):
    strategy = getattr(ShardingStrategy, case, ShardingStrategy.FULL_SHARD)
    model = net("fsdp1-2", use_orig_params=use_orig_params, sharding_strategy=strategy)
    layer, targets = model.module.l1.module, prune.select(model)
    if case == "without its wrapper":
        model.module.l1 = layer
        gc.collect()

    def call(model):
        if single:
            prune.l1_unstructured(layer, "weight", 0.5)
        else:
            prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)

    summoned = FullyShardedDataParallel.summon_full_params(model)
    return model, call, summoned if case == "summoned" else nullcontext()


def on_a_mesh(kind: str, ranks: list) -> nn.Module:
    model = seeded(Net((6, 12, 6, 12)))
    names = ("dp", "tp") if isinstance(ranks[0], list) else ("dp",)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    if kind == "tp":
        return parallelize_module(model, mesh, {"l1": ColwiseParallel()})
    if kind == "fsdp2_tp":
        parallelize_module(model, mesh["tp"], {"l1": ColwiseParallel()})
        mesh = mesh["dp"]
    return fully_shard(model, mesh=mesh)


def out_of_order(kind: str, ranks: list, call):
    return on_a_mesh(kind, ranks), call


def group_without_all_shards(wrapping: str, groups: list):
    """A part of the shards cannot know which elements are the lowest of the parameter."""
    made = [dist.new_group(ranks) for ranks in groups]  # on every rank, all of them
    group = next(g for g, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)
    return net(wrapping), partial(prune_all, group=group)


ORDER = "ranks do not ascend"
MESHES = {
    "FSDP2": ("fsdp2", [2, 0, 1]),
    "HSDP": ("fsdp2", [[3, 1], [0, 2]]),
    "HSDP, on some ranks only": ("fsdp2", [[0, 1], [3, 2]]),
    "TP": ("tp", [1, 0]),
    "FSDP2 over TP: the shards of FSDP2": ("fsdp2_tp", [[2, 3], [0, 1]]),
    "FSDP2 over TP: those of TP": ("fsdp2_tp", [[1, 0], [3, 2]]),
}
WAYS_OUT = {"NO_SHARD": "DistributedDataParallel", "summoned": "outside of that context"}
PLACEMENT = r"weight(.|\n)*(Partial|P\(sum\))"
CASES = [  # number of ranks, how the model is made, the error
    (2, partial(partial_placement, prune_one), PLACEMENT),
    (2, partial(partial_placement, prune_all), PLACEMENT),
    (2, scores_on_other_placements, r"weight(.|\n)*Shard\(dim=1\)", "ValueError"),
    (2, partial(fsdp1, "without its wrapper"), "whose wrapper is gone"),
    *(
        (2, partial(fsdp1, case, use_orig_params, single), text)
        for case, text in WAYS_OUT.items()
        for use_orig_params in (False, True)
        for single in (False, True)
    ),
    *(
        (torch.tensor(ranks).numel(), partial(out_of_order, kind, ranks, call), ORDER)
        for kind, ranks in MESHES.values()
        for call in (prune_one, prune_all)
    ),
]
GROUPS = [
    ("fsdp2-2", [[0], [1]]),
    ("tp-2", [[0], [1]]),
    ("fsdp2-4", [[0, 1], [2, 3]]),
    ("hsdp-2x2", [[0, 2], [1, 3]]),
    ("fsdp2_tp-2x2", [[0, 1], [2, 3]]),
]
CASES += [
    (wrappings.world_size(each[0]), partial(group_without_all_shards, *each), "group", "ValueError")
    for each in GROUPS
]


def outcomes_of_refusals(makers: list) -> list[tuple]:
    """What each call raises on this rank, and changes."""
    found = []
    for make in makers:
        model, call, *contexts = make()
        with contexts[0] if contexts else nullcontext():
            found.append(outcome(model, partial(call, model)))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_refuses_and_nothing_changes(size):
    cases = [case for case in CASES if case[0] == size]
    wrong, per_rank = [], run_ranks(outcomes_of_refusals, size, [make for _, make, *_ in cases])
    for (_, make, text, *kind), found in zip(cases, zip(*per_rank, strict=True), strict=True):
        wrong += other_errors(found, (kind or ["NotImplementedError"])[0], text, str(make))
    assert not wrong, "\n".join(wrong)[:5000]


def wrong_on_ascending_lines(ranks: list, first: set) -> list[str]:
    """HSDP whose shards lie on ascending ranks; only the replicas are listed in another order."""
    model, full = on_a_mesh("fsdp2", ranks), seeded(Net((6, 12, 6, 12)))
    prune_all(model)
    layers = dict(model.named_children())
    keeps = reference.prune([full.get_submodule(path).weight for path in layers], 0.5)
    wrong = []
    for (path, layer), keep in zip(layers.items(), keeps, strict=True):
        part = keep.chunk(2)[0 if dist.get_rank() in first else 1]
        if not torch.equal(wrappings.local(layer.weight_mask), part):
            wrong.append(path)
    return wrong


def test_replicas_may_be_listed_in_any_order():
    assert_nothing_wrong(run_ranks(wrong_on_ascending_lines, 4, [[2, 3], [0, 1]], {0, 2}))
