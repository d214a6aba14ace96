"""Results are the frozen ones, case by case, whatever the number of ranks; see make.py."""

import pytest

pytest.importorskip("transformers")

from golden import checkpoints, corpus
from helpers.sampling import every

FROZEN = corpus.stored()


def check(found):
    differing = corpus.differences(found, FROZEN["results"])
    assert not differing, "\n".join(
        [f"{len(differing)} of {len(found)} cases differ from results.json:", *differing]
    )


@pytest.mark.parametrize("num_ranks", checkpoints.NUM_RANKS)
@pytest.mark.parametrize("name", every(3, checkpoints.BY_NAME))
def test_checkpoints(name, num_ranks):
    number = list(checkpoints.BY_NAME).index(name)
    requests = every(3, checkpoints.requests_of(name), number // 3 + num_ranks)
    source, found = checkpoints.results(name, requests, num_ranks)
    if source != FROZEN["sources"][name] and corpus.versions() != FROZEN["made_with"]:
        pytest.skip(f"{corpus.versions()} make another checkpoint than {FROZEN['made_with']}")
    assert source == FROZEN["sources"][name], "the checkpoint itself is another one"
    check(found)


def test_every_case_is_frozen():
    assert sorted(FROZEN["results"]) == sorted(checkpoints.ALL_CASES)
    assert set(FROZEN["sources"]) == set(checkpoints.BY_NAME)
