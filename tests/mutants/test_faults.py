"""Each row of faults.toml fits the package and its tests, so that ``make mutants`` runs."""

import pytest

from mutants.run import FAULTS, ROOT, find


@pytest.mark.parametrize("name", FAULTS)
def test_the_text_is_there_once_and_the_tests_exist(name):
    fault = FAULTS[name]
    assert find(ROOT / "distprune", fault).exists() and fault["new"] != fault["old"]
    for test in fault["tests"]:
        file, *path = test.partition("[")[0].split("::")
        indent = "    " * (len(path) - 1)
        function = path[-1] if path else "test_"
        assert f"\n{indent}def {function}" in (ROOT / "tests" / file).read_text()
