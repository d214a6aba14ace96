"""Before Triton's kernels are used on a device, they have to give what torch's operations give."""

import logging
import os
from dataclasses import replace

import pytest
import torch

from distprune.selection import kernels

CPU = torch.device("cpu")


@pytest.fixture
def check():
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here, and does not interpret")
    from distprune.selection import triton_kernels

    return triton_kernels


def test_the_kernels_pass(check):
    check.check_on(CPU)


def with_wrong_count(scan):
    def scan_wrongly(*args):
        (found,) = scan(*args)
        return [replace(found, num_below=found.num_below + 1)]

    return scan_wrongly


def with_wrong_draft(scan):
    def scan_wrongly(parts, chunks, pivots, interval, outs, share):
        found = scan(parts, chunks, pivots, interval, outs, share)
        outs[0][12_345] = ~outs[0][12_345]
        return found

    return scan_wrongly


def with_wrong_write(write):
    def write_wrongly(parts, chunks, cuts, outs):
        pruned = write(parts, chunks, cuts, outs)
        outs[0][-1] = ~outs[0][-1]
        return pruned

    return write_wrongly


@pytest.mark.parametrize(
    ("name", "mistake", "said"),
    [
        ("scan", with_wrong_count, "numbers below differ"),
        ("scan", with_wrong_draft, "drafted masks differ"),
        ("prune_collected", lambda prune: lambda *_: [torch.tensor(0)], "numbers pruned differ"),
        ("write", with_wrong_write, "written masks differ"),
    ],
)
def test_a_wrong_kernel_is_not_used(check, monkeypatch, caplog, name, mistake, said):
    monkeypatch.setattr(check, name, mistake(getattr(check, name)))
    kernels._compiled_on.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert kernels._compiled_on(CPU) is None
    kernels._compiled_on.cache_clear()
    assert said in caplog.text and "torch operations are used" in caplog.text
