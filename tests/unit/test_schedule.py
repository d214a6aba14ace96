"""Schedules as functions of the step."""

import copy
import itertools
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distprune as prune
from distprune import schedule
from distprune.call import run
from helpers import reference
from helpers.models import Net, seeded
from helpers.sampling import num_examples

STEPS = st.integers(0, 60)
SPARSITY = st.floats(0, 1)


def due_steps(what, upto=200):
    return [step for step in range(upto) if what.is_due(step)]


def test_one_shot():
    once = schedule.OneShot(step=3, sparsity=0.5)
    assert due_steps(once) == [3]
    assert [once.sparsity_at(step) for step in (0, 2, 3, 100)] == [0.0, 0.0, 0.5, 0.5]


def test_linear_and_cubic():
    linear = schedule.Linear(10, 50, 10, 0.8, initial_sparsity=0.4)
    cubic = schedule.Cubic(10, 50, 10, 0.8, initial_sparsity=0.4)
    assert due_steps(linear) == due_steps(cubic) == [10, 20, 30, 40, 50]
    for s, (i, step) in itertools.product((linear, cubic), enumerate((10, 20, 30, 40, 50))):
        power = 1 if s is linear else 3
        exact = Fraction(8, 10) - Fraction(4, 10) * Fraction(4 - i, 4) ** power
        assert s.sparsity_at(step) == pytest.approx(float(exact), abs=1e-15)
    assert linear.sparsity_at(9) == cubic.sparsity_at(9) == 0.0
    assert linear.sparsity_at(29) == linear.sparsity_at(20)  # holds until the next due step


@pytest.mark.parametrize(
    ("begin", "end", "frequency", "due"),
    [
        (0, 10, 4, [0, 4, 8, 10]),  # the end is due whether or not it is a multiple
        (5, 5, 3, [5]),
        (2, 6, 100, [2, 6]),
        (0, 0, 1, [0]),
    ],
)
def test_due_steps(begin, end, frequency, due):
    for kind in (schedule.Linear, schedule.Cubic):
        ramp = kind(begin, end, frequency, 0.7)
        assert due_steps(ramp) == due
        assert ramp.sparsity_at(end) == ramp.sparsity_at(end + 5) == 0.7
    function = schedule.Function(lambda step: 0.1, frequency, begin, end)
    assert due_steps(function) == due


@settings(max_examples=num_examples(300), deadline=None, derandomize=True)
@given(STEPS, STEPS, st.integers(1, 70), SPARSITY, SPARSITY)
def test_ramps_never_decrease_and_meet_both_ends(begin, length, frequency, one, other):
    low, high = sorted((one, other))
    for kind in (schedule.Linear, schedule.Cubic):
        ramp = kind(begin, begin + length, frequency, high, low)
        values = [ramp.sparsity_at(step) for step in range(begin + length + 3)]
        assert values == sorted(values)
        assert values[-1] == values[begin + length] == high
        assert values[begin] == (low if length else high)
        changes = [t for t, (a, b) in enumerate(itertools.pairwise(values), 1) if a != b]
        assert all(ramp.is_due(step) for step in changes)


def test_function():
    seen = []

    def fn(step):
        seen.append(step)
        return np.float32(0.25)

    function = schedule.Function(fn, frequency=5, begin=10)
    assert due_steps(function, 30) == [10, 15, 20, 25]
    assert function.sparsity_at(9) == 0.0 and seen == []
    assert function.sparsity_at(17) == 0.25 and seen == [15]
    bounded = schedule.Function(fn, frequency=5, begin=10, end=12)
    assert bounded.sparsity_at(1000) == 0.25 and seen[-1] == 12


@pytest.mark.parametrize(
    ("value", "error"),
    [(math.nan, ValueError), (1.5, ValueError), (-0.1, ValueError), ("0.5", TypeError),
     (None, TypeError), (True, TypeError), (torch.tensor(0.5), TypeError)],
)  # fmt: skip
def test_a_function_that_returns_no_sparsity(value, error):
    with pytest.raises(error, match=r"fn\(4\)"):
        schedule.Function(lambda step: value).sparsity_at(4)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: schedule.OneShot(-1, 0.5), ValueError, "step=-1"),
        (lambda: schedule.OneShot(1.0, 0.5), TypeError, "step=1.0"),
        (lambda: schedule.OneShot(1, math.nan), ValueError, "sparsity=nan"),
        (lambda: schedule.OneShot(1, 2), ValueError, "sparsity=2"),
        (lambda: schedule.Linear(5, 4, 1, 0.5), ValueError, "end=4 comes before begin=5"),
        (lambda: schedule.Linear(0, 4, 0, 0.5), ValueError, "frequency=0"),
        (lambda: schedule.Cubic(0, 4, True, 0.5), TypeError, "frequency=True"),
        (lambda: schedule.Cubic(0, 4, 1, 0.5, 0.6), ValueError, "initial_sparsity=0.6 is above"),
        (lambda: schedule.Cubic(0, 4, 1, "0.5"), TypeError, "final_sparsity='0.5'"),
        (lambda: schedule.Function(0.5), TypeError, "fn=0.5"),
        (lambda: schedule.Function(abs, frequency=0), ValueError, "frequency=0"),
        (lambda: schedule.Function(abs, begin=3, end=2), ValueError, "end=2"),
    ],
)
def test_bad_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()


def some_function(step):
    return step / 100


def test_schedules_are_values():
    cubic = schedule.Cubic(0, 10, 2, 0.8)
    assert cubic == schedule.Cubic(0, 10, 2, 0.8) != schedule.Linear(0, 10, 2, 0.8)
    assert len({cubic, schedule.Cubic(0, 10, 2, 0.8)}) == 1
    assert eval(repr(cubic), vars(schedule)) == cubic
    with pytest.raises(AttributeError):
        cubic.begin = 3
    with_numpy = schedule.Cubic(np.int64(0), np.int32(10), 2, np.float64(0.8), 0)
    assert repr(with_numpy) == repr(cubic) and with_numpy == cubic
    function = schedule.Function(some_function, 3)
    assert repr(function) == "Function(fn=some_function, frequency=3, begin=0, end=None)"
    assert function == schedule.Function(some_function, 3)


# The pruner that follows a schedule, on one process.


def weights(model):
    return prune.select(model, names=("weight", "bias"), everything=True)


def pruner_of(model, plan, **options):
    return schedule.ScheduledPruner(weights(model), plan, **options)


def total(model):
    return sum(parameter.numel() for parameter in model.parameters())


def zeros(targets):
    return sum(int((getattr(m, n + "_mask") == 0).sum()) for m, n in targets)


@pytest.mark.parametrize(("scores", "num_reads"), [(None, 1), ({}, 2)])
def test_a_due_step_reads_the_parameters_once(scores, num_reads, monkeypatch):
    """Unless there are scores: a function for them may change the model before they are used."""
    reads, read = [], run.read_parameters
    monkeypatch.setattr(run, "read_parameters", lambda *args: (reads.append(args), read(*args))[1])
    model = seeded(Net())
    pruner = pruner_of(model, schedule.OneShot(0, 0.5), importance_scores=scores)
    assert pruner.step() is not None
    assert len(reads) == num_reads


def test_nothing_is_pruned_where_the_model_is_pruned_further_already():
    model = seeded(Net())
    prune.global_unstructured(weights(model), prune.L1Unstructured, amount=0.6)
    before = zeros(weights(model))
    pruner = pruner_of(model, schedule.Linear(0, 4, 1, 0.8))
    results = [pruner.step() for _ in range(5)]
    assert [report is None for report in results] == [True, True, True, True, False]
    assert results[-1].num_pruned_before == before == round(0.6 * total(model))
    assert zeros(weights(model)) == round(0.8 * total(model))


def test_a_decreasing_function_takes_nothing_back():
    model = seeded(Net())
    values = [0.2, 0.5, 0.3, 0.5, 0.6]
    pruner = pruner_of(model, schedule.Function(values.__getitem__))
    done = [pruner.step() is not None for _ in values[:3]]
    assert done == [True, True, False] and pruner.sparsity == 0.5
    assert [pruner.step() is not None for _ in values[3:]] == [False, True]


def test_a_step_that_fails_does_not_count():
    model = seeded(Net())
    answers = iter([math.nan, 0.5, 0.5])
    pruner = pruner_of(model, schedule.Function(lambda step: next(answers)))
    with pytest.raises(ValueError, match=r"fn\(0\)=nan"):
        pruner.step()
    assert pruner.num_steps == 0 and pruner.sparsity == 0.0 and not prune.is_pruned(model)
    assert pruner.step().num_pruned == round(0.5 * total(model))
    assert pruner.step() is None and pruner.num_steps == 2

    def no_scores():
        raise LookupError("no gradients yet")

    model = seeded(Net())
    pruner = pruner_of(model, schedule.OneShot(0, 0.5), importance_scores=no_scores)
    state = pruner.state_dict()
    with pytest.raises(LookupError, match="no gradients yet"):
        pruner.step()
    assert pruner.state_dict() == state and not prune.is_pruned(model)


def test_scores_are_asked_for_when_something_is_pruned():
    model = seeded(Net())
    calls = []

    def scores():
        calls.append(pruner.num_steps)
        return {(m, n): -getattr(m, n + "_orig" if prune.is_pruned(m) else n).abs() + 10
                for m, n in weights(model)}  # fmt: skip

    pruner = pruner_of(model, schedule.Linear(1, 5, 2, 0.5), importance_scores=scores)
    largest = max(float(p.detach().abs().max()) for p in model.parameters())
    for _ in range(8):
        pruner.step()
    assert calls == [3, 5]  # at step 1 the target is 0
    kept = [getattr(m, n + "_orig")[getattr(m, n + "_mask") == 1] for m, n in weights(model)]
    assert max(float(k.detach().abs().max()) for k in kept if k.numel()) < largest


@pytest.mark.parametrize("end", [11, None])
def test_floors_hold_once_the_target_suffices_for_them(end):
    """On the way there no parameter is pruned beyond its floor; ceilings hold all the way."""
    model = seeded(Net())
    with torch.no_grad():  # else no bound would be met
        model.l1.weight.mul_(0.1)
        model.l3.weight.mul_(10)
    targets = prune.select(model, everything=True)
    names, sizes = [pair.fqn for pair in targets], [60, 50, 15]
    scores = [getattr(*pair).detach().clone() for pair in targets]
    keeps = [torch.ones(score.shape) for score in scores]
    floors, ceilings = [0.3, 0.3, 0.55], [0.7, 0.7, 0.7]
    low = [18, 15, 9]  # of l3 ceil(0.55 * 15)
    ramp = schedule.Linear(0, 11, 1, 0.66)
    pruner = schedule.ScheduledPruner(
        targets,
        ramp if end else schedule.Function(ramp.sparsity_at),
        min_sparsity={names[0]: 0.3, targets[1]: 0.3, "l3.weight": 0.55},
        max_sparsity=0.7,
    )
    held = set()
    for step in range(12):
        report = pruner.step()
        k = round(ramp.sparsity_at(step) * 125) - sum(int((keep == 0).sum()) for keep in keeps)
        if sum(low) > round(ramp.sparsity_at(step) * 125):
            limits = [0] * 3, [Fraction(a, b) for a, b in zip(low, sizes, strict=True)]
        else:
            limits = floors, ceilings
        keeps = reference.prune_bounded(scores, k, *limits, keeps)
        assert (report is None) == (k == 0)
        for (module, _), keep in zip(targets, keeps, strict=True):
            assert torch.equal(getattr(module, "weight_mask", torch.ones_like(keep)), keep.float())
        held |= {(step > 3, each.held_at) for each in (report.parameters if report else ())}
    # First floors as ceilings; then both: l3 would be below its floor, l1 above its ceiling.
    assert held >= {(False, "max_sparsity"), (True, "min_sparsity"), (True, "max_sparsity")}
    assert (False, "min_sparsity") not in held


def test_the_state_is_plain_and_says_what_differs():
    import json

    model = seeded(Net())
    pruner = schedule.ScheduledPruner(
        prune.select(model, everything=True), schedule.OneShot(0, 1 / 3)
    )
    pruner.step()
    state = json.loads(json.dumps(pruner.state_dict()))
    assert state["num_steps"] == 1 and state["sparsity"] == 1 / 3
    other = schedule.ScheduledPruner(prune.select(model, everything=True), schedule.OneShot(0, 0.5))
    with pytest.raises(ValueError, match=r"OneShot\(step=0, sparsity=0.333.*sparsity=0.5\)"):
        other.load_state_dict(state)
    assert other.num_steps == 0
    fewer = prune.select(model, exclude="l2", everything=True)
    with pytest.raises(ValueError, match=r"the parameters \[.*'l2.weight'.* of this pruner"):
        schedule.ScheduledPruner(fewer, schedule.OneShot(0, 1 / 3)).load_state_dict(state)


TO_80, TO_79 = (schedule.Cubic(0, 9, 1, end, initial_sparsity=0.1) for end in (0.8, 0.79))


@pytest.mark.parametrize(
    ("parameters", "arguments", "error", "text"),
    [
        (prune.select, {"schedule": 0.5}, TypeError, "schedule is 0.5"),
        (lambda m: [m.l1], {}, TypeError, "pair"),
        (lambda m: [(m.l1, "wieght")], {}, AttributeError, "wieght"),
        (lambda m: [], {}, ValueError, "empty"),
        (prune.select, {"min_sparsty": 0.1}, TypeError, "min_sparsty"),
        (prune.select, {"importance_scores": 3}, TypeError, "importance_scores"),
        # Bounds that the end cannot meet are refused at once.
        (prune.select, {"schedule": TO_80, "max_sparsity": 0.75}, ValueError,
         r"end of Cubic\(.*to 93 more pruned elements, and 100 are"),
        (prune.select, {"schedule": TO_79, "min_sparsity": 0.8}, ValueError,
         r"end of Cubic\(.*allow for 100 to"),
        (prune.select, {"schedule": TO_80, "min_sparsity": 0.9, "max_sparsity": 0.8}, ValueError,
         "min_sparsity asks for at least 54"),
        (prune.select, {"min_sparsity": {"l4": 0.1}}, ValueError, "'l4', which is none"),
    ],
)  # fmt: skip
def test_bad_pruners(parameters, arguments, error, text):
    arguments = {"schedule": schedule.OneShot(0, 0.5), **arguments}
    with pytest.raises(error, match=text):
        schedule.ScheduledPruner(parameters(Net()), **arguments)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_prunes_the_copy_of_the_model(copied):
    model = seeded(Net())
    targets = prune.select(model)
    pruner = schedule.ScheduledPruner(targets, schedule.OneShot(0, 0.5), max_sparsity=0.9)
    other, its_model = copied((pruner, model))
    assert [pair.fqn for pair in other.parameters] == [pair.fqn for pair in targets]
    assert [pair.places for pair in other.parameters] == [(tuple(p),) for p in other.parameters]
    assert other.step().num_pruned == zeros(prune.select(its_model))
    assert prune.is_pruned(its_model) and not prune.is_pruned(model)
