"""A pattern matches the whole name of a parameter or of its module; live models and files agree."""

import signal
import threading

import pytest

from distprune.base import selecting
from distprune.base.selecting import check_pattern, matcher

NAME = "layers.0.mlp.weight"


@pytest.mark.parametrize(
    "pattern",
    ["*", "layers.*", "layers.0.mlp", NAME, "*.weight", "layers.[01].*", "?ayers.0.mlp.weight"]
    + ["re:layers\\.\\d+\\.mlp", "re:.*weight", "re:layers.0.mlp.weight"],
)
def test_a_whole_name_matches(pattern):
    assert matcher(pattern)(NAME)


@pytest.mark.parametrize(
    "pattern",
    ["layers", "layers.0", "mlp", "weight", "0.mlp.weight", "Layers.*", "layers.?", "", "re:layers"]
    + ["re:", "re:mlp.weight", "re:LAYERS.*", "re: .*"],
)
def test_a_part_of_a_name_does_not(pattern):
    assert not matcher(pattern)(NAME)


def test_a_parameter_of_the_root_has_a_module_without_a_name():
    assert matcher("weight")("weight")
    assert matcher("*")("weight")
    assert not matcher("*.weight")("weight")


@pytest.mark.parametrize("pattern", ["re:(", "re:[", "re:*", "re:" + "(" * 10_000])
def test_what_is_no_expression_is_refused(pattern):
    with pytest.raises(ValueError):
        check_pattern(pattern)


@pytest.mark.parametrize("pattern", ["(", "[", "re:", "re:(a|b)*", ""])
def test_what_is_one_is_not(pattern):
    check_pattern(pattern)


@pytest.mark.parametrize("expression", ["(a+)+$", "(a|a)*b", "(?:a*)*b", "(?!(a+)+b).*"])
def test_a_search_without_end_is_an_error_that_names_the_pattern(monkeypatch, expression):
    monkeypatch.setattr(selecting, "_SECONDS", 0.05)
    name = "a" * 60 + ".weight"
    with pytest.raises(ValueError, match="takes more than") as error:
        matcher(f"re:{expression}")(name)
    assert repr(f"re:{expression}") in str(error.value) and name in str(error.value)


def test_the_timer_and_the_handler_of_the_caller_stay():
    def own(*_):
        raise AssertionError("the timer of the caller ran out")

    before = signal.signal(signal.SIGVTALRM, own)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000, 7)
    try:
        assert matcher("re:layers.*")(NAME)
        remaining, interval = signal.getitimer(signal.ITIMER_VIRTUAL)
        assert signal.getsignal(signal.SIGVTALRM) is own
        assert 900 < remaining <= 1001 and interval == pytest.approx(7, abs=0.1)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_other_threads_search_without_a_limit():
    found = []
    thread = threading.Thread(target=lambda: found.append(matcher("re:layers.*")(NAME)))
    thread.start()
    thread.join()
    assert found == [True]
