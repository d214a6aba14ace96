"""The oracle against masks written by hand, and against torch where torch defines an order."""

import itertools
import math

import torch

from helpers import reference
from helpers.sampling import axes, covering


def bools(*rows: str) -> torch.Tensor:
    """'x' is pruned, '.' is kept."""
    return torch.tensor([[c == "." for c in row] for row in rows])


def test_lowest_magnitudes_of_all_tensors_go():
    scores = [torch.tensor([[1.0, -0.1], [3.0, 0.2]]), torch.tensor([[-0.15, 9.0]])]
    first, second = reference.prune(scores, 3)
    assert torch.equal(first, bools(".x", ".x"))
    assert torch.equal(second, bools("x."))


def test_ties_go_by_tensor_then_row_major_index():
    scores = [torch.full((2, 2), -2.0), torch.full((1, 2), 2.0)]
    first, second = reference.prune(scores, 3)
    assert torch.equal(first, bools("xx", "x."))
    assert torch.equal(second, bools(".."))


def test_zeros_are_equal_denormals_differ_inf_is_largest():
    tiny = 2.0**-149
    scores = [torch.tensor([[math.inf, 2 * tiny, 0.0, -0.0, -tiny, 3e38]])]
    masks = [reference.prune(scores, k)[0] for k in range(7)]
    order = ["......", "..x...", "..xx..", "..xxx.", ".xxxx.", ".xxxxx", "xxxxxx"]
    assert [torch.equal(m, bools(row)) for m, row in zip(masks, order, strict=True)] == [True] * 7


def test_pruned_elements_do_not_compete_and_stay_pruned():
    scores = [torch.tensor([[1.0, 2.0, 3.0, 4.0]])]
    (keep,) = reference.prune(scores, 0.5, [bools("...x")])
    assert torch.equal(keep, bools("xx.x"))  # round(1.5) = 2 of the three that are left


def test_bounds_by_hand():
    """Worked out on paper: three tensors, the first with all the small values."""
    scores = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([50.0, 40, 60, 70]), torch.tensor([9.0])]
    free = [0.0] * 3, [1.0] * 3

    def kept(*arguments):
        keeps = reference.prune_bounded(scores, *arguments)
        return None if keeps is None else [keep.int().tolist() for keep in keeps]

    assert kept(3, *free) == [[0, 0, 0, 1], [1, 1, 1, 1], [1]]
    assert kept(3, [0, 0.25, 0], free[1]) == [[0, 0, 1, 1], [1, 0, 1, 1], [1]]
    assert kept(3, [0, 0.26, 0], free[1]) == [[0, 1, 1, 1], [0, 0, 1, 1], [1]]
    assert kept(4, free[0], [0.5, 1, 1]) == [[0, 0, 1, 1], [1, 0, 1, 1], [0]]
    assert kept(4, free[0], [0.5, 1, 0.9]) == [[0, 0, 1, 1], [0, 0, 1, 1], [1]]
    assert kept(3, [1.0, 0, 0], free[1]) is None
    assert kept(5, free[0], [0.5, 0.5, 0.5]) is None
    # One that is above its ceiling already just gets no more.
    masks = [torch.tensor([1, 0, 0, 0]), torch.ones(4), torch.ones(1)]
    assert kept(2, free[0], [0.5, 1, 1], masks) == [[1, 0, 0, 0], [1, 0, 1, 1], [0]]
    assert kept(1, [0, 0.5, 0], free[1], masks) is None


# The sample of a matrix: few cases, with every value of every argument, the same each time.


def test_a_few_cases_have_every_value_of_every_argument():
    cases = [
        {"wrapping": w, "dtype": d, "score": s}
        for w, d, s in itertools.product("abcdefg", (1, 2, 3), (str, int))
        if (w, d) != ("a", 1)
    ]
    chosen = covering(cases)
    assert chosen == sorted(set(chosen)) == covering(cases) and len(chosen) == 7
    for name in cases[0]:
        assert {case[name] for case in cases} == {cases[i][name] for i in chosen}


def test_wrappings_have_kinds_and_sizes():
    cases = [{"wrapping": name, "x": 1} for name in ("fsdp1_flat-2", "hsdp-1x3", "tp-3")]
    assert [axes(case, kinds=True, sizes=True) for case in cases] == [
        {"wrapping": "fsdp1_flat", "size": 2, "x": 1},
        {"wrapping": "hsdp", "size": 3, "x": 1},
        {"wrapping": "tp", "size": 3, "x": 1},
    ]
    ways = [axes(case, kinds=False, sizes=False)["wrapping"] for case in cases]
    assert ways == [False, True, True]  # DTensors?
    assert axes({"x": 2}, kinds=True, sizes=True) == {"x": 2}
