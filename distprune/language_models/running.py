"""Running a model over windows of tokens, which the data-parallel ranks share.

[Note: steps] Windows are put together to batches, in their order, whatever the number of ranks. In
step s the data-parallel rank r of n runs batch s * n + r. Where the last step has no batch for a
rank, that rank runs the first one again and does not count it: FSDP and DDP communicate inside of a
forward, so that all ranks run the model equally often. The ranks of a tensor-parallel group
run the same batches.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distprune.base.naming import named_modules, unwrap
from distprune.base.pruned_form import is_dtensor
from distprune.language_models.text import TokenWindows
from distprune.ranks.process_groups import is_distributed, over_groups, world
from distprune.wrappers.managed import ManagedRun
from distprune.wrappers.wrapper import managed_parameters

# Of CPUs, x86 and ARM: those that multiply matrices of a dtype.
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


@dataclass(frozen=True)
class RunProgress:
    """How far a run over windows is; the same on every rank.

    Attributes:
        phase: what it is: "evaluate", "calibrate" or "prune".
        num_done: how many units are finished, by all ranks together.
        total: units of the run.
        seconds: since it began.
        unit: what is counted: "windows"; or "forwards of a layer", of one window each, where a
            model is streamed and its passes take unequally long.
    """

    phase: str
    num_done: int
    total: int
    seconds: float
    unit: str = "windows"

    @property
    def per_second(self) -> float:
        """The rate so far; 0.0 at the beginning."""
        return self.num_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """The estimated time left; None until a rate is known."""
        rate = self.per_second
        return (self.total - self.num_done) / rate if rate else None


Report = Callable[[RunProgress], object]


@dataclass(frozen=True)
class DataRanks:
    """The ranks that share the windows.

    Attributes:
        index: this rank's place among them.
        size: how many there are.
        is_counted: whether this rank's results count; of ranks that run the same windows, one's.
        averages_gradients: whether the wrapper of the model averages gradients over them.
    """

    index: int
    size: int
    is_counted: bool
    averages_gradients: bool = True


def data_ranks(model: nn.Module) -> DataRanks:
    """The data-parallel ranks of a model, as its wrapper says.

    Of a model that nothing wraps, every rank has a copy, and all ranks share the windows.

    Raises:
        NotImplementedError: tensor parallelism over some of the ranks, without FSDP or DDP; parts
            of the model with different data-parallel ranks.

    Cost: one walk over the modules; no communication.
    """
    if not is_distributed():
        return DataRanks(0, 1, True)
    everyone = list(range(dist.get_world_size()))
    found: dict[tuple[int, ...], str] = {}
    paths = {id(module): path for path, module in named_modules(model)}
    for (owner, name), record in managed_parameters(model).items():
        if owner in paths:
            if isinstance(record, ManagedRun):
                groups = list(record.groups)
            else:
                source = record.gradient_source()
                shards = source.shard_group
                groups = ([] if shards is None else [shards]) + list(source.replica_groups)
            found.setdefault(tuple(over_groups(groups).ranks), f"{paths[owner]}.{name}")
    if len(found) > 1:
        (ranks, name), (others, other) = list(found.items())[:2]
        raise NotImplementedError(
            f"{name} is data-parallel over the ranks {list(ranks)}, and {other} over "
            f"{list(others)}; expected the same ranks for all parameters."
        )
    if found:
        return _among(next(iter(found)), everyone)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return _among(tuple(dist.get_process_group_ranks(module.process_group)), everyone)
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            if sorted(parameter.device_mesh.mesh.flatten().tolist()) != everyone:
                raise NotImplementedError(
                    f"{name} is on a mesh of {parameter.device_mesh.size()} of {len(everyone)} "
                    "ranks, without FSDP or DDP, so that nothing tells whether the others have "
                    "replicas; expected tensor parallelism over all ranks, or FSDP or DDP too."
                )
            return _among((dist.get_rank(),), everyone)
    return DataRanks(dist.get_rank(), len(everyone), True, averages_gradients=len(everyone) == 1)


def _among(ranks: tuple[int, ...], everyone: list[int]) -> DataRanks:
    return DataRanks(ranks.index(dist.get_rank()), len(ranks), everyone[0] in ranks)


@dataclass(frozen=True)
class Step:
    """What a rank runs in one step; see [Note: steps].

    Attributes:
        rows: the windows of its batch.
        is_padding: they are not to be counted.
        num_in_step: windows of all ranks that count in this step.
    """

    rows: slice
    is_padding: bool
    num_in_step: int

    @property
    def num_windows(self) -> int:
        """Windows of this rank that count."""
        return 0 if self.is_padding else self.rows.stop - self.rows.start


def steps_of(num_windows: int, batch_size: int, ranks: DataRanks) -> list[Step]:
    """The steps of this rank, as many on every rank; see [Note: steps]."""
    num_batches = -(-num_windows // batch_size)
    steps = []
    for first in range(0, num_batches, ranks.size):
        begin, end = first * batch_size, min((first + ranks.size) * batch_size, num_windows)
        number = first + ranks.index
        is_padding = number >= num_batches
        start = 0 if is_padding else number * batch_size
        rows = slice(start, min(start + batch_size, num_windows))
        steps.append(Step(rows, is_padding, end - begin))
    return steps


class Reporter:
    """Calls a function with the progress of a run, after every step.

    Args:
        phase, total, unit: see :class:`RunProgress`.
        report: the function; None: nothing is called.
    """

    def __init__(
        self, phase: str, total: int, report: Report | None, unit: str = "windows"
    ) -> None:
        self._phase, self._total, self._unit = phase, total, unit
        self._report = report
        self._num_done, self._began = 0, time.monotonic()

    def add(self, number: int) -> None:
        """Count units that all ranks have finished since the last call."""
        self._num_done += number
        if self._report is not None:
            seconds = time.monotonic() - self._began
            self._report(RunProgress(self._phase, self._num_done, self._total, seconds, self._unit))


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off; afterwards every module has the mode that it had.

    FSDP2 keeps the root's parameters gathered after a forward, in case a backward follows. None
    follows what runs here: they are sharded again, so that an optimizer which is made next gets the
    shards.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
            if hasattr(module, "set_reshard_after_forward"):  # only modules of FSDP2
                cast(Any, module).reshard()


def check_run(model: nn.Module, windows: TokenWindows, batch_size: int) -> None:
    """Check what a model is going to run. Local: a local step of the caller's collective.

    Raises:
        ValueError: tokens or positions that the model does not have, and that would fail in the
            middle of a forward; a batch size out of range; no windows.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; expected at least 1 window.")
    if not len(windows):
        raise ValueError("windows has none; expected at least 1 window.")
    config: Any = getattr(unwrap(model), "config", None)
    if config is None:
        return
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(config, "vocab_size", None)
    largest = int(windows.tokens.max())
    if vocabulary is not None and largest >= vocabulary:
        raise ValueError(
            f"the windows have the token {largest}, and the model has {vocabulary} tokens; "
            "expected the tokenizer of this model."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and windows.length > positions:
        raise ValueError(
            f"the windows have {windows.length} tokens, and the model has {positions} positions "
            "(max_position_embeddings); expected windows that are not longer."
        )


def _warn_of_slow_dtype(model: nn.Module) -> None:
    """Warn of weights in 16 bits that the CPU multiplies without instructions of their own."""
    get: Any = getattr(torch.cpu, "get_capabilities", None)  # not in every torch
    has = {} if get is None else get()
    on_cpu = {p.dtype for p in model.parameters() if p.device.type == "cpu"}
    for dtype in sorted(on_cpu & _INSTRUCTIONS.keys(), key=str):
        if get is not None and not any(has.get(name) for name in _INSTRUCTIONS[dtype]):
            warnings.warn(
                f"the weights are {dtype}, and this CPU has no instructions for products of it: a "
                "run takes several times as long as in float32. Load the model in float32 "
                "(dtype=torch.float32, or --dtype float32), with twice the memory for the weights.",
                stacklevel=4,
            )


def inputs_of(model: nn.Module, windows: TokenWindows, rows: slice) -> Tensor:
    """The tokens of a batch, int64 [windows, length], where the model is."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    return windows.tokens[rows].to(device)


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the forward of the model, inside all wrappers, has an argument of this name."""
    return argument in inspect.signature(unwrap(model).forward).parameters


def output_of(model: nn.Module, **arguments: Any) -> Any:
    """What a model returns, run without a cache of keys and values."""
    if accepts(model, "use_cache"):
        arguments["use_cache"] = False
    return model(**arguments)


def check_same(model: nn.Module, windows: TokenWindows, batch_size: int) -> DataRanks:
    """:func:`check_run` on all ranks, which have the same arguments. Collective.

    Returns:
        The ranks that share the windows.

    Raises:
        ValueError, NotImplementedError: as :func:`check_run` and :func:`data_ranks`; ranks with
            different windows.

    Warns, on the first rank, of a dtype that this CPU computes slowly.

    Cost: one all-reduce of 40 bytes.
    """

    def check() -> DataRanks:
        check_run(model, windows, batch_size)
        return data_ranks(model)

    facts = [("batch_size", str(batch_size)), ("windows", f"{tuple(windows.tokens.shape)}")]
    communicator = world()
    ranks = communicator.run(
        check,
        lambda ranks: [*facts, *windows.digests(), ("data-parallel ranks", str(ranks.size))],
    )
    if communicator.index == 0:
        _warn_of_slow_dtype(model)
    return ranks
