"""The sample of a matrix: few cases, with every value of every argument, the same each time."""

import itertools

from helpers.sampling import axes, covering


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
