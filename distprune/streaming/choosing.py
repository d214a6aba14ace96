"""Whether the weights of a model stay in memory, and who reads them: by what there is."""

from __future__ import annotations

import torch

from distprune._common.collectives import Communicator
from distprune.files.errors import MachineError
from distprune.files.text import format_size
from distprune.language_models.memory import available_memory
from distprune.streaming.cost import StreamCost
from distprune.streaming.parts import Holding, num_machines
from distprune.streaming.settings import Settings


def chosen_holding(
    cost: StreamCost, settings: Settings, communicator: Communicator
) -> tuple[Holding, str]:
    """How the ranks come by the weights of layers, and a sentence that says why. Collective.

    Weights stay in memory where the ranks have an accelerator each, and a rank's part of them fits
    beside what a pass needs. On a CPU the system keeps what was read of a file as far as memory is
    free, and gives it up when it is needed: measured in tests/benchmarks/TRIED.md.

    Args:
        cost: of the passes.
        settings: says where layers run, and what the caller has asked for.
        communicator: of the ranks.

    Raises:
        MachineError: the caller has asked for weights that stay, and there is too little memory for
            them; on every rank.
    """
    num_ranks = communicator.size
    part = -(-cost.weights // num_ranks)
    needed = cost.peak + part

    def free() -> torch.Tensor:
        found = available_memory(settings.device)
        return torch.tensor([-1 if found is None else found])

    least = int(communicator.reduce(1, free, "min")[0])
    fits = needed <= least
    has = "nothing tells how much is free" if least < 0 else f"{format_size(least)} are free"
    told = f"of {format_size(needed)} of memory that each process then needs, {has}"
    if settings.resident and not fits and least >= 0:
        raise MachineError(
            f"the weights cannot stay in memory: {told}. Expected more processes or memory, or "
            "layers that are streamed (--way streamed)."
        )
    on_accelerator = settings.device.type != "cpu"
    keeps = on_accelerator and fits if settings.resident is None else settings.resident
    num_hosts = num_machines(num_ranks)
    shares = num_ranks > 1 and (keeps or num_hosts > 1)
    if keeps:
        share = "" if num_ranks == 1 else f", a part of {format_size(part)} on each process"
        return Holding(
            shares, keeps
        ), f"Resident: weights are read once, and stay in memory{share}."
    why = ""
    if settings.resident is None:
        why = f", as {told}" if on_accelerator else ", as files that were read stay in free memory"
    if shares:
        why += f"; on {num_hosts} machines each process reads a part of it"
    return Holding(shares), f"Streamed: each pass reads a layer when it needs it{why}."
