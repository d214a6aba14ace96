"""The sample of a matrix: few cases, with every value of every argument, the same each time."""

import itertools

from helpers.sampling import by_wrapper, covering


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


def test_one_argument_has_all_its_cases():
    assert covering([{"number": n} for n in range(5)]) == [0, 1, 2, 3, 4]
    assert covering([]) == []


def test_wrappers_have_kinds_and_sizes():
    names = [
        "fsdp1_flat-2",
        "fsdp1-3",
        "fsdp2_root-2",
        "fsdp2-4",
        "fsdp2_tp-2x2",
        "hsdp-2x2",
        "tp-2",
    ]
    found = [by_wrapper({"wrapping": name, "x": 1}) for name in names]
    assert [each["wrapping"] for each in found] == [
        "fsdp1", "fsdp1", "fsdp2", "fsdp2", "fsdp2_tp", "hsdp", "tp"
    ]  # fmt: skip
    assert all(each["x"] == 1 for each in found)
    assert by_wrapper({"x": 2}) == {"x": 2}
