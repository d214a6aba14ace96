"""Test distributed code in a fraction of a second: run a function on 1 to 8 gloo ranks.

The ranks are real processes that talk over gloo. They start once per pytest process (some
seconds) and are reused; each further call only makes a new process group (some 50 ms for two
ranks)::

    import torch
    import torch.distributed as dist

    from distprune.testing import run_ranks


    def sum_of_ranks():  # a function of the test's file, not a lambda
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        return int(total)


    def test_all_reduce():
        assert run_ranks(sum_of_ranks, 4) == [6, 6, 6, 6]

A failing rank's traceback becomes the text of a :class:`RankError`; a rank that hangs is killed
at the deadline, and its stack is shown. No network port is needed, so any number of
pytest processes (``pytest -n 4`` of pytest-xdist) can run side by side. The machine needs no
accelerator and no more cores than one. Linux and macOS; nothing here imports pytest.

The library itself does not need this package, and ``import distprune`` does not load it.
"""

from distprune.testing.pool import RankError, preload, run_ranks

__all__ = ["RankError", "preload", "run_ranks"]
