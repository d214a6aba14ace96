"""What pruning by text takes, from headers alone, and whether the weights fit beside it."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from distprune.base.naming import NamedParameter
from distprune.files.errors import MachineError
from distprune.files.text import format_size
from distprune.language_models.losses import SLICE
from distprune.ranks.collectives import Communicator
from distprune.streaming.layers import Holding, StoredLayers, StreamedModel, num_machines
from distprune.streaming.settings import Settings

# What Python, torch, transformers, a large tokenizer and the solver's temporaries take.
_BASE = 900_000_000
# Of a weight that has a score of its own: a sum, the score, and what both are made of.
_BYTES_OF_SCORES = 3 * torch.float32.itemsize


@dataclass(frozen=True)
class StreamCost:
    """What a pruning by text needs on each process, at most.

    Attributes:
        memory: bytes of each pass, by its name; where the passes run on a device, of its memory.
        disk: bytes of the folder of work, which is removed at the end, of all processes together.
        reads: bytes of the checkpoint that each process reads to run text through layers.
        weights: bytes of all weights, of which each process keeps its part if they are resident.
    """

    memory: dict[str, int]
    disk: int
    reads: int
    weights: int

    @property
    def peak(self) -> int:
        """Bytes of the pass that needs most."""
        return max(self.memory.values())

    def check(self, device: torch.device) -> None:
        """Raise MachineError if a device, or this machine, has less memory in all."""
        has = _memory_of(device)
        if has is not None and self.peak > has:
            name = max(self.memory, key=lambda name: self.memory[name])
            raise MachineError(
                f"pruning by text needs about {format_size(self.peak)} of memory for the {name}, "
                f"and {device} has {format_size(has)}; expected more memory, shorter windows "
                "(--length), or fewer in a batch (--batch-size)."
            )


def cost_of(streamed: StreamedModel, stored: StoredLayers, settings: Settings) -> StreamCost:
    """Estimate what a pruning needs.

    Args:
        streamed: the model.
        stored: its layers, as they lie in the checkpoint.
        settings: of the pruning.

    Cost: walks over the modules.
    """
    parameters = stored.parameters
    batch_size, length = settings.batch_size, settings.windows.length
    num_evaluated = 0 if settings.evaluation is None else len(settings.evaluation)
    passes = [name for name in settings.passes if name != "update" or settings.moves]
    model = streamed.model
    item = model.dtype.itemsize
    config = model.config.get_text_config()
    num_layers = len(streamed.layers)
    tokens = batch_size * length
    layers = [streamed.num_bytes(number) for number in range(num_layers)]
    features = max(map(_features, streamed.layers)) + 4 * config.hidden_size
    activations = tokens * features * item
    # A layer's attention matrices, where the implementation makes them.
    heads = getattr(config, "num_attention_heads", 1)
    activations += batch_size * heads * length**2 * item
    around = streamed.num_bytes(None) + 3 * 4 * min(tokens * config.vocab_size, SLICE)
    memory = {
        "embedding and head": around + tokens * config.hidden_size * item * 4,
        "forward": max(layers) + activations,
    }
    pruned = [sum(_weight(p).numel() for p in of_layer) for of_layer in parameters]
    if "backward" in passes:
        num_scores = len(settings.elementwise)
        memory["backward"] = 2 * activations + max(
            size + numel * (item + _BYTES_OF_SCORES * num_scores)
            for size, numel in zip(layers, pruned, strict=True)
        )
    if "update" in passes:
        memory["update"] = activations + max(
            _of_update(size, of_layer) for size, of_layer in zip(layers, parameters, strict=True)
        )
    disk = len(settings.windows) * length * config.hidden_size * item * (num_layers + 3)
    disk += num_evaluated * length * config.hidden_size * item * 4
    disk += sum(pruned) * item if "update" in passes else 0
    disk += stored.num_scored(settings.elementwise) * torch.float32.itemsize
    reads = len(passes) * sum(layers)
    reads += 2 * streamed.num_bytes(None)
    return StreamCost(
        {name: size + _BASE for name, size in memory.items()}, disk, reads, sum(layers)
    )


def _available_memory(device: torch.device) -> int | None:
    """Bytes that this rank may still take, its share of the machine's; None if nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    file = Path("/proc/meminfo")
    if device.type != "cpu" or not file.exists():
        return None
    lines = file.read_text().splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    return found[0] // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if found else None


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
        found = _available_memory(settings.device)
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


def _of_update(layer: int, parameters: Collection[NamedParameter]) -> int:
    """A layer with masks, new weights and what undoes them, Gram matrices, and one in fp64."""
    if not parameters:
        return layer
    inputs = {id(module): module for module, _ in parameters}
    sizes = [_inputs_of(module) for module in inputs.values()]
    grams = sum(4 * size**2 * num for size, num in sizes)
    solver = max(8 * size**2 for size, _ in sizes)
    weights = list(map(_weight, parameters))
    of_weights = sum(w.numel() + 3 * w.nbytes for w in weights)
    return layer + of_weights + grams + solver + max(w.numel() for w in weights)


def _inputs_of(module: nn.Module) -> tuple[int, int]:
    """Inputs of a layer, and how many matrices it has; of experts, the larger dimension."""
    shapes = [tuple(p.shape) for p in module.parameters(recurse=False) if p.ndim >= 2]
    if isinstance(module, nn.Linear) or not shapes:
        return getattr(module, "in_features", 0), 1
    largest = max(shapes, key=lambda shape: max(shape[-2:]))
    return max(largest[-2:]), largest[0] if len(largest) == 3 else 1


def _features(layer: nn.Module) -> int:
    """Numbers of a token that a layer keeps for a backward, about."""
    experts = [p for p in layer.parameters() if p.ndim == 3]
    linear = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    features = sum(module.in_features + module.out_features for module in linear)
    return features + sum(sum(p.shape[-2:]) for p in experts)


def _weight(parameter: NamedParameter) -> torch.Tensor:
    module, name = parameter
    return module.get_parameter(name)


def _memory_of(device: torch.device) -> int | None:
    """Bytes of a device's memory, or of this machine's; None: it does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
