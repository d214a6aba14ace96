"""Record the calls of one ``global_unstructured`` under FSDP2, from the call down to the kernels.

python docs/trace_of_a_call.py

One gloo rank, on the CPU. A profile function sees every call of a function of distprune; what is
printed is included by docs/how_it_works.md. The build of the documentation runs it (hooks.py).

A kernel is a function of ``distprune/ranking/cpu.py``: the code that touches elements. Frames of
torch and of the standard library are not counted, and neither are comprehensions, which Python 3.12
and later run without a frame of their own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune

PACKAGE = Path(prune.__file__).parent
KERNELS = "ranking/cpu.py"
ENTRY = "global_unstructured"
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}


@dataclass(frozen=True)
class Frame:
    """A function of the package that was on the stack.

    Attributes:
        file: relative to the package, with forward slashes.
        function: its qualified name.
    """

    file: str
    function: str


@dataclass(frozen=True)
class Trace:
    """What was seen during one call.

    Attributes:
        files: files of the package in the order in which their first function was called.
        paths: the stack at the first call of each kernel, from ``global_unstructured`` on.
    """

    files: tuple[str, ...]
    paths: tuple[tuple[Frame, ...], ...]

    @property
    def longest(self) -> tuple[Frame, ...]:
        """The path with the most frames; the last of them, if several are as long."""
        return max(reversed(self.paths), key=len)


def record(call: Callable[[], object]) -> Trace:
    """Run a function, and record the calls of ``global_unstructured`` in it."""
    files: dict[str, None] = {}
    paths: dict[str, tuple[Frame, ...]] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or _file(frame) is None:
            return
        stack = _stack(frame)
        if not stack:
            return
        files.setdefault(stack[-1].file)
        is_entered = len(stack) == 1 or stack[-2].file != KERNELS
        if stack[-1].file == KERNELS and is_entered:
            paths.setdefault(stack[-1].function, stack)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Trace(tuple(files), tuple(paths.values()))


def trace_under_fsdp2() -> Trace:
    """The trace of a global pruning of two layers, sharded by FSDP2 over one rank."""
    torch.set_num_threads(1)  # a profile function sees the calls of its own thread only
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            pairs = prune.select(model)
            return record(
                lambda: prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
            )
        finally:
            dist.destroy_process_group()


def as_text(trace: Trace) -> str:
    """The trace for readers: the longest path to a kernel, then the length of every path."""
    longest = trace.longest
    width = max(len(frame.file) for frame in longest)
    lines = [f"{len(longest)} frames from {ENTRY} to the kernel {longest[-1].function}:", ""]
    lines += [
        f"{number:3}  {frame.file:{width}}  {frame.function}"
        for number, frame in enumerate(longest, 1)
    ]
    lines += ["", "frames to each kernel, in the order of their first calls:", ""]
    lines += [f"{len(path):3}  {path[-1].function}" for path in trace.paths]
    lines += ["", "files of the package, in the order in which the call enters them:", ""]
    lines += [f"     {file}" for file in trace.files]
    return "\n".join(lines) + "\n"


def _file(frame: FrameType) -> str | None:
    """The file of a frame, relative to the package; None for another one, or a comprehension."""
    code = frame.f_code
    if code.co_name in COMPREHENSIONS or not code.co_filename.startswith(str(PACKAGE)):
        return None
    return Path(code.co_filename).relative_to(PACKAGE).as_posix()


def _stack(frame: FrameType) -> tuple[Frame, ...]:
    """Frames of the package from ``global_unstructured`` to this one; () outside of a call."""
    frames: list[Frame] = []
    current: FrameType | None = frame
    while current is not None:
        file = _file(current)
        if file is not None:
            frames.append(Frame(file, _name(current)))
            if current.f_code.co_name == ENTRY:
                return tuple(reversed(frames))
        current = current.f_back
    return ()


def _name(frame: FrameType) -> str:
    code = frame.f_code
    qualified = getattr(code, "co_qualname", code.co_name)  # Python 3.11
    return qualified.replace(".<locals>", "")


def main() -> None:
    sys.stdout.write(as_text(trace_under_fsdp2()))


if __name__ == "__main__":
    main()
