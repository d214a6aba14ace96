"""The process of one rank: it answers one call after another, each in a new group.

[Note: one group after another in one process] Three things make this safe:
  - a barrier right after init: a rank that failed while another was still inside
    init would leave their group counters apart, and the next call would hang;
  - DTensor's caches are cleared after destroy: they would return the mesh of the
    previous call, whose groups are destroyed, and keep the threads of those groups;
  - the groups are destroyed only when every rank has answered, so that no rank
    sees "connection closed by peer" because another one was quicker.

[Note: the last reference to a group] The destructor of a gloo group waits for its
threads, and a thread that frees the tensors of a collective needs the GIL. Python's own
reference to a group releases the GIL before it runs the destructor; other references, such
as that of DDP's reducer, do not, and the rank would hang (pytorch/pytorch#56297). So this
module keeps references of its own, and drops them last.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from distprune.testing.calls import PackedCall

if TYPE_CHECKING:
    RankConnection = Connection[Any, Any]

# Private functions of torch, by module; a torch that lacks one has no such cache.
_DTENSOR_CACHES = {
    "torch.distributed.tensor.debug": ("_clear_sharding_prop_cache",),
    "torch.distributed.tensor._redistribute": (
        "clear_redistribute_planner_cache",
        "_gen_transform_infos.cache_clear",
    ),
    "torch.distributed.tensor._collective_utils": ("MeshTopoInfo.build_from_mesh.cache_clear",),
}


def work(pipe: RankConnection, stack_file: str) -> None:
    """Answer calls until the other end closes; SIGUSR1 writes the stack to a file."""
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # full collections then visit the tests' objects only, not the preloaded ones
    with open(stack_file, "w") as stacks, contextlib.suppress(EOFError, OSError):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        while True:
            rank, world_size, store, call = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(_answer(rank, world_size, store, call))
            pipe.recv_bytes()  # every rank has answered
            _leave_group()


def clear_dtensor_caches() -> None:
    """Forget every mesh that DTensor has cached; see [Note: one group after another]."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, functions in _DTENSOR_CACHES.items():
        for path in functions:
            function: Any = None
            with contextlib.suppress(ImportError):
                function = importlib.import_module(module)
            for attribute in path.split("."):
                function = getattr(function, attribute, None)
            if function is not None:
                function()


def _answer(rank: int, world_size: int, store: str, call: PackedCall) -> bytes:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # torch.distributed does not declare it

    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=5),
        )
        dist.barrier()
        torch.manual_seed(1000 + rank)
        fn, args, kwargs = call.unpack()
        return pickle.dumps(("ok", fn(*args, **kwargs)))
    except BaseException:  # including SystemExit and pytest.fail
        return pickle.dumps(("error", traceback.format_exc()))


def _leave_group() -> None:
    import torch.distributed as dist

    groups: list[dist.ProcessGroup] = []
    if dist.is_initialized():
        groups += dist.distributed_c10d._world.pg_map
        dist.destroy_process_group()
    clear_dtensor_caches()
    gc.collect()  # wrapped models are reference cycles that keep the group and its threads
    groups.clear()  # the last references; see [Note: the last reference to a group]
