"""What pruning by text takes, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from distprune.base.naming import NamedParameter
from distprune.files.errors import OutputError
from distprune.files.text import format_size
from distprune.language_models.losses import SLICE
from distprune.streaming.layers import StoredLayers, StreamedModel
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
    """

    memory: dict[str, int]
    disk: int
    reads: int

    @property
    def peak(self) -> int:
        """Bytes of the pass that needs most."""
        return max(self.memory.values())

    def check(self, device: torch.device) -> None:
        """Raise OutputError if a device, or this machine, has less memory in all."""
        has = _memory_of(device)
        if has is not None and self.peak > has:
            name = max(self.memory, key=lambda name: self.memory[name])
            raise OutputError(
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
    return StreamCost({name: size + _BASE for name, size in memory.items()}, disk, reads)


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
