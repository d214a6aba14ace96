"""Run a function as each rank of a fake process group, in one process."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distprune.testing import clear_dtensor_caches


def run_fake_ranks(
    fn: Callable, world_size: int, *args: Any, ranks: Iterable[int] | None = None, **kwargs: Any
) -> list[Any]:
    """Call fn as each of ``ranks`` in turn, to test geometry at any world size.

    Collectives do nothing; pass ``src_data_rank=None`` to distribute_tensor.
    """
    results = []
    for rank in range(world_size) if ranks is None else ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            results.append(fn(*args, **kwargs))
        finally:
            dist.destroy_process_group()
            clear_dtensor_caches()
    return results
