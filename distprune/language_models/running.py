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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distprune.base.naming import named_modules, unwrap
from distprune.base.pruned_form import is_dtensor
from distprune.files.team import Progress
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import is_distributed, over_groups, world
from distprune.wrappers.wrapper import managed_parameters

Report = Callable[[Progress], object]


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
            ranks = over_groups(record.groups).ranks
            found.setdefault(tuple(ranks), f"{paths[owner]}.{name}")
    if len(found) > 1:
        (ranks, name), (others, other) = list(found.items())[:2]
        raise NotImplementedError(
            f"{name} is data-parallel over the ranks {list(ranks)}, and {other} over "
            f"{list(others)}; expected the same ranks for all parameters."
        )
    wrapper = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    sharded = next(((n, p) for n, p in model.named_parameters() if is_dtensor(p)), None)
    if found:
        members = list(next(iter(found)))
    elif wrapper is not None:
        members = dist.get_process_group_ranks(wrapper.process_group)
    elif sharded is not None:
        name, parameter = sharded
        if sorted(parameter.device_mesh.mesh.flatten().tolist()) != everyone:
            raise NotImplementedError(
                f"{name} is on a mesh of {parameter.device_mesh.size()} of {len(everyone)} ranks, "
                "without FSDP or DDP, so that nothing tells whether the others have replicas; "
                "expected tensor parallelism over all ranks, or FSDP or DDP too."
            )
        members = [dist.get_rank()]
    else:
        return DataRanks(dist.get_rank(), len(everyone), True, len(everyone) == 1)
    return DataRanks(members.index(dist.get_rank()), len(members), 0 in members)


class Step(NamedTuple):
    """What a rank runs in one step; see [Note: steps].

    Attributes:
        rows: the windows of its batch.
        num_windows: how many of them count: all, or none.
        num_in_step: windows of all ranks that count in this step.
    """

    rows: slice
    num_windows: int
    num_in_step: int


def steps_of(num_windows: int, batch_size: int, ranks: DataRanks) -> list[Step]:
    """The steps of this rank, as many on every rank; see [Note: steps]."""
    batches = [
        slice(start, min(start + batch_size, num_windows))
        for start in range(0, num_windows, batch_size)
    ]
    steps = []
    for first in range(0, len(batches), ranks.size):
        in_step = batches[first : first + ranks.size]
        is_counted = ranks.index < len(in_step)
        rows = in_step[ranks.index] if is_counted else batches[0]
        num_in_step = in_step[-1].stop - in_step[0].start
        steps.append(Step(rows, is_counted * (rows.stop - rows.start), num_in_step))
    return steps


def reporter(
    phase: str, total: int, report: Report | None, unit: str = "windows"
) -> Callable[[int], None]:
    """A function that counts units which all ranks have finished, and tells ``report``."""
    num_done = 0

    def add(number: int) -> None:
        nonlocal num_done
        num_done += number
        if report is not None:
            report(Progress(phase, num_done, total, unit))

    return add


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


def check_run(model: nn.Module, tokens: Tensor, batch_size: int = 1) -> None:
    """Check what a model is going to run. Local: a local step of the caller's collective.

    Args:
        tokens: int64 [windows, length].

    Raises:
        ValueError: tokens or positions that the model does not have, and that would fail in the
            middle of a forward; a batch size out of range; no windows.
    """
    if batch_size < 1 or not len(tokens):
        raise ValueError(f"batch_size={batch_size}, {len(tokens)} windows; expected at least 1.")
    config: Any = getattr(unwrap(model), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and int(tokens.max()) >= vocabulary:
        raise ValueError(
            f"the windows have the token {int(tokens.max())}, and the model has {vocabulary} "
            "tokens; expected the tokenizer of this model."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and tokens.shape[1] > positions:
        raise ValueError(
            f"the windows have {tokens.shape[1]} tokens, and the model has {positions} positions "
            "(max_position_embeddings); expected windows that are not longer."
        )


def check_finite(moved: Mapping[str, Tensor]) -> None:
    """Raise ValueError if weights that have moved are not finite, in the dtype that keeps them."""
    for name, tensor in moved.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(
                f"{name}: moved weights are not finite as {tensor.dtype}, in which they are kept; "
                "expected update none and polish 0, or weights of bfloat16."
            )


def on_device_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Tokens where the model is."""
    return tokens.to(next((p.device for p in model.parameters()), tokens.device))


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the forward of the model, inside all wrappers, has an argument of this name."""
    return argument in inspect.signature(unwrap(model).forward).parameters


def output_of(model: nn.Module, tokens: Tensor, needs_logits: bool = True) -> Any:
    """What a model returns for tokens, int64 [windows, length], without keeping keys and values.

    If no logits are needed, they are of one position, of models that can leave out the others. It
    is given as a tensor: for a number, Gemma 4 runs its last layers on that position alone, and on
    a CPU the head takes 40 times as long in bfloat16.
    """
    arguments: dict[str, Any] = {"use_cache": False} if accepts(model, "use_cache") else {}
    if not needs_logits and accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = on_device_of(model, tokens.new_zeros(1))
    return model(input_ids=on_device_of(model, tokens), **arguments)


def check_same(model: nn.Module, windows: TokenWindows, batch_size: int) -> DataRanks:
    """:func:`check_run` on all ranks, which have the same arguments. Collective.

    Returns:
        The ranks that share the windows.

    Raises:
        ValueError, NotImplementedError: as :func:`check_run` and :func:`data_ranks`; ranks with
            different windows.

    Cost: one all-reduce of 40 bytes.
    """

    def check() -> DataRanks:
        check_run(model, windows.tokens, batch_size)
        return data_ranks(model)

    facts = [("batch_size", str(batch_size)), *windows.digests()]
    return world().run(check, lambda ranks: [*facts, ("data-parallel ranks", str(ranks.size))])
