"""Tests of single functions start no processes, but for those marked as slow: see `make quick`."""

import subprocess

import pytest

from distprune import testing


@pytest.fixture(autouse=True)
def _starts_no_process_unless_slow(request, monkeypatch):
    if request.node.get_closest_marker("slow"):
        return

    def refuse(*_, **__):
        raise AssertionError("this test starts processes; expected the mark pytest.mark.slow")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(testing._Pool, "run", refuse)
