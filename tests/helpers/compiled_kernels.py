"""Compile Triton's kernels, as they are launched, for devices that are not here.

    python tests/helpers/compiled_kernels.py cuda:90:32=float32,random hip:gfx942:64=widened

Prints JSON: per target, kind of parameter and kernel, the assembly of everything that was compiled.
Everything up to the launch is Triton's own: what it compiles for follows from the arguments. No
kernel runs.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from distprune.selection import triton_kernels
from distprune.selection.candidates import Candidates, Collected, Cut, Draw
from distprune.selection.keys import Order, RandomKeys, ScoreKeys, key_range
from distprune.selection.scores import TensorScores
from distprune.shards.geometry import IndexMap

N = 10_000


class Driver:
    """What Triton asks a device for before it launches."""

    def __init__(self, number: int, target: GPUTarget) -> None:
        self.get_current_device = lambda: number
        self.get_current_stream = lambda device: 0
        self.get_current_target = lambda: target


def parts() -> dict[str, tuple[Candidates, torch.dtype]]:
    """Of each kind, a parameter and the dtype of its mask."""
    index = IndexMap((range(N),), (1,), 0)
    flags = torch.ones(N, dtype=torch.bool)

    def part(keys, live=None):
        return Candidates(keys, live, index, range(N), N, N, torch.device("cpu"))

    def scored(dtype, order=Order.MAGNITUDE, common=None, start=0):
        scores = TensorScores(torch.ones(N + start, dtype=dtype)[start:])
        return ScoreKeys(scores, key_range(common or dtype, order))

    return {
        "float32": (part(scored(torch.float32)), torch.bool),
        "bfloat16": (part(scored(torch.bfloat16)), torch.bool),
        "unaligned": (part(scored(torch.bfloat16, start=1)), torch.bool),
        "widened": (part(scored(torch.bfloat16, common=torch.float32), flags), torch.bool),
        "float16": (
            part(scored(torch.float16, Order.ASCENDING), torch.ones(N, dtype=torch.float16)),
            torch.float16,
        ),
        "float64": (part(scored(torch.float64, Order.DESCENDING)), torch.float64),
        "random": (part(RandomKeys(3, 2**40, index, torch.device("cpu"))), torch.bool),
    }


def compile_all(number: int, target: GPUTarget, kinds: list[str]) -> dict[str, dict[str, str]]:
    """Assembly by kind of parameter and kernel."""
    driver.set_active(Driver(number, target))
    found: dict[str, dict[str, str]] = {}
    run = JITFunction.run
    for kind in kinds:
        part, dtype = parts()[kind]
        assembly = found[kind] = {}

        def compiled(self, *args, grid, warmup, assembly=assembly, **options):
            result = run(self, *args, grid=grid, warmup=True, **options)
            assembly[self.fn.__name__] = result.asm["ptx" if target.backend == "cuda" else "amdgcn"]
            return result

        out = torch.ones(N, dtype=dtype)
        high = part.keys.common.high if isinstance(part.keys, ScoreKeys) else 2**62
        # What no kernel has written: one element in every tile.
        with (
            mock.patch.object(JITFunction, "run", compiled),
            mock.patch.object(torch, "empty", torch.ones),
            mock.patch.object(torch, "zeros", torch.ones),
        ):
            chunks = [(0, range(N))]
            triton_kernels.scan([part], chunks, [3, high, high - 1], (4, high), [out], 0.1)
            triton_kernels.write([part], chunks, [(0, Cut(7, 0, 5))], [out])
            keys = torch.ones(3, dtype=part.keys.dtype)
            positions = torch.ones(3, dtype=torch.int32)
            collected = Collected(range(N), positions, keys, True, 3)
            triton_kernels.prune_collected([part], {0: [collected]}, Cut(7, 0, 5), [out])
            triton_kernels.sample([part], [Draw(0, 0, 16, N // 16, 7)], high, 5)
            triton_kernels.histogram(keys, 4, 7, 1)
    return found


def main() -> None:
    found = {}
    for number, argument in enumerate(sys.argv[1:]):
        name, _, kinds = argument.partition("=")
        backend, arch, warp = name.split(":")
        target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
        found[name] = compile_all(number, target, kinds.split(","))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
