"""What pruning by text takes, from headers alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distprune.language_models.losses import SLICE
from distprune.streaming.layers import StoredLayers, StreamedModel
from distprune.streaming.passes import Settings

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


def cost_of(streamed: StreamedModel, stored: StoredLayers, settings: Settings) -> StreamCost:
    """Estimate what a pruning needs.

    Args:
        streamed: the model.
        stored: its layers, as they lie in the checkpoint.
        settings: of the pruning.

    Cost: walks over the modules.
    """
    config, item = streamed.model.config.get_text_config(), streamed.model.dtype.itemsize
    length = settings.windows.length
    tokens, width = settings.batch_size * length, config.hidden_size * item
    num_layers = len(streamed.layers)
    layers = [streamed.num_bytes(number) for number in range(num_layers)]
    weights: list[list[Tensor]] = [
        [module.get_parameter(name) for module, name in pairs] for pairs in stored.parameters
    ]
    pruned = [sum(weight.numel() for weight in of_layer) for of_layer in weights]
    # What matrices take and return, and attention where the implementation makes its matrices.
    features = max(
        sum(sum(p.shape[-2:]) for p in layer.parameters() if p.ndim > 1)
        for layer in streamed.layers
    )
    heads = getattr(config, "num_attention_heads", 1)
    activations = tokens * (features * item + 4 * width) + tokens * length * heads * item
    around, logits = streamed.num_bytes(-1), 3 * 4 * min(tokens * config.vocab_size, SLICE)
    memory = {
        "embedding and head": around + logits + 4 * tokens * width,
        "forward": max(layers) + activations,
    }
    if "backward" in settings.passes:
        of_weight = item + _BYTES_OF_SCORES * len(settings.elementwise)
        sizes = zip(layers, pruned, strict=True)
        memory["backward"] = 2 * activations + max(size + n * of_weight for size, n in sizes)
    if settings.moves:
        updates = map(_bytes_of_update, weights)
        sizes = zip(layers, updates, strict=True)
        memory["update"] = activations + max(size + update for size, update in sizes)
    num_evaluated = 0 if settings.evaluation is None else len(settings.evaluation)
    disk = (len(settings.windows) * (num_layers + 3) + 4 * num_evaluated) * length * width
    disk += sum(pruned) * item if settings.moves else 0
    disk += stored.num_scored(settings.elementwise) * torch.float32.itemsize
    num_passes = len(settings.passes) - ("update" in settings.passes and not settings.moves)
    reads = num_passes * sum(layers) + 2 * around
    return StreamCost({name: size + _BASE for name, size in memory.items()}, disk, reads)


def _bytes_of_update(weights: list[Tensor]) -> int:
    """Masks, new weights and what undoes them, Gram matrices, and two in fp64."""
    inputs = [(max(w.shape[-2:]), len(w)) if w.ndim == 3 else (w.shape[-1], 1) for w in weights]
    grams = sum(4 * size**2 * number for size, number in inputs)
    solver = max((8 * size**2 for size, _ in inputs), default=0)
    return grams + 2 * solver + sum(w.numel() + 3 * w.nbytes for w in weights)
