"""What a call costs per parameter, where there are many small ones: microseconds of CPU time.

    python tests/benchmarks/bench_many_parameters.py [--sizes 100,1000] [--kinds plain,fsdp2,tp]
        [--device cuda]

Every parameter has 64 elements, so that nothing but the fixed cost is measured, in the thread that
calls. plain runs in one process, on any device; fsdp2 and tp on two gloo ranks. On any machine
the numbers of a row must not grow with the number of parameters ("one by one" under FSDP2 does,
slowly: each first pruning of a single parameter looks through all that FSDP2 shards).
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import distprune
from distprune.call import run as pipeline
from distprune.methods import builtin as methods

STAGES = {
    "read and agree": (pipeline, "read_parameters"),
    "count": (pipeline, "count_live_and_compare"),
    "decide": (methods.L1Unstructured, "decide"),
    "attach": (pipeline, "attach_masks"),
}
SINGLE = 500  # parameters that are pruned one by one, at most


class Block(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(kind: str, num_parameters: int, device: str) -> nn.Module:
    """Blocks of ten layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(10) for _ in range(-(-num_parameters // 10)))).to(device)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                weight = distribute_tensor(layer.weight.data, mesh, [Shard(0)])
                layer.weight = nn.Parameter(weight)
    return model


def measure(kind: str, num_parameters: int, device: str) -> dict[str, float]:
    """Microseconds per parameter."""
    model = build(kind, num_parameters, device)
    row: dict[str, float] = {}

    def timed(what: str, fn: Callable, count: int = num_parameters) -> object:
        gc.collect()
        started = time.thread_time()
        result = fn()
        if device != "cpu":
            torch.accelerator.synchronize()
        row[what] = (time.thread_time() - started) / count * 1e6
        return result

    def watch(what: str, owner: object, name: str) -> Callable[[], None]:
        function = getattr(owner, name)

        def watched(*args: object, **kwargs: object) -> object:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                row[what] = (time.thread_time() - started) / num_parameters * 1e6

        setattr(owner, name, watched)
        return lambda: setattr(owner, name, function)

    def prune_all() -> object:
        return distprune.global_unstructured(selected, distprune.L1Unstructured, amount=0.2)

    def prune_each() -> None:
        for module, name in selected[:SINGLE]:
            distprune.l1_unstructured(module, name, 0.2)

    def remove_all() -> None:
        for module, name in selected:
            distprune.remove(module, name)

    selected = timed("select", lambda: distprune.select(model, everything=True))
    timed("first pruning", prune_all)
    restore = [watch(f"  {what}", *where) for what, where in STAGES.items()]
    report = timed("second pruning", prune_all)
    for undo in restore:
        undo()
    timed("report", lambda: (str(report), report.to_json()))
    timed("remove", remove_all)
    timed("one by one", prune_each, min(SINGLE, len(selected)))
    timed("one by one, again", prune_each, min(SINGLE, len(selected)))
    pruner = distprune.schedule.ScheduledPruner(selected, distprune.schedule.OneShot(10**9, 0.9))
    timed("a step that is not due, in all", lambda: [pruner.step() for _ in range(1000)], 1000)
    return row


def on_rank(rank: int, store: str, kind: str, sizes: list[int]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    show(kind, sizes, "cpu", is_leader=rank == 0)
    dist.destroy_process_group()


def show(kind: str, sizes: list[int], device: str, is_leader: bool = True) -> None:
    torch.set_num_threads(1)
    measure(kind, 10, device)  # imports and caches
    columns = [measure(kind, size, device) for size in sizes]
    if is_leader:
        title = f"{kind} on {device}, torch {torch.__version__}"
        print(f"\n{title:36}" + "".join(f"{size:>9,}" for size in sizes))
        for what in columns[0]:
            print(f"{what:36}" + "".join(f"{column[what]:>9.1f}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100,1000,5000")
    parser.add_argument("--kinds", default="plain,fsdp2,tp")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    for kind in options.kinds.split(","):
        if kind == "plain":
            show(kind, sizes, options.device)
        else:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(on_rank, (f"{folder}/store", kind, sizes), nprocs=2)


if __name__ == "__main__":
    main()
