"""A language model in a folder, of which one decoder layer is in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.naming import named_modules
from distprune._transformers.building import (
    build_without_weights,
    put_tensor,
    tensors_of_checkpoints,
)
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.language_models.calibrating import decoder_blocks
from distprune.language_models.loading import (
    PartReader,
    TensorSource,
    find_sources,
    read_tensor,
    stored_dtype,
    untie_different,
)


class StreamedModel:
    """The model of a folder: its decoder layers are read when they are needed, and freed after.

    Args:
        checkpoint: its headers were read.
        dtype: of the parameters; None: that of the config, else of the first weights.
        device: where layers run.

    Attributes:
        model: of transformers. Parameters that are not in memory are on the meta device.
        layers: its decoder layers, in the order in which they run.
        sources: of each layer, which tensors of the checkpoint make which of its tensors.

    Raises:
        ValueError: tensors are missing, or have another shape; no decoder layers are known.
        NotImplementedError: a model whose layers share parameters, or are no decoder; as
            ``load_sharded``.
        ImportError: the extra ``language-models`` is not installed.

    Cost: no memory for parameters.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.model = build_without_weights(checkpoint.folder, dtype or stored_dtype(checkpoint))
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise NotImplementedError(
                f"{checkpoint.folder}: {type(self.model).__name__} has an encoder, and so is no "
                "chain of decoder layers; expected a decoder. Load it with load_sharded."
            )
        untie_different(self.model, checkpoint)
        found = find_sources(self.model, checkpoint, ignore_unexpected=True)
        self.layers = _outermost(decoder_blocks(self.model))
        paths = {id(module): path for path, module in named_modules(self.model)}
        self.prefixes = [f"{paths[id(layer)]}." for layer in self.layers]
        self.sources: list[list[TensorSource]] = [[] for _ in self.layers]
        self._around: list[TensorSource] = []
        for names, source in found:
            numbers = {self.layer_of(name) for name in names}
            if len(numbers) > 1:
                raise NotImplementedError(
                    f"{names[0]} and {names[-1]} are one parameter, and are not in the same "
                    "decoder layer; expected layers with parameters of their own. Load the model "
                    "with load_sharded."
                )
            (number,) = numbers
            (self._around if number is None else self.sources[number]).append((names, source))
        for name, buffer in list(self.model.named_buffers()):
            if not buffer.is_meta:
                put_tensor(self.model, name, buffer.to(device))
        self._tensors = dict(tensors_of_checkpoints(self.model))
        self._reader = PartReader(checkpoint)

    def layer_of(self, name: str) -> int | None:
        """The number of the decoder layer that has a tensor of the model; None: none has."""
        prefixes = enumerate(self.prefixes)
        return next((number for number, prefix in prefixes if name.startswith(prefix)), None)

    def num_bytes(self, number: int | None) -> int:
        """Bytes of a layer, or of all that is around the layers (None)."""
        sources = self._around if number is None else self.sources[number]
        return sum(self._tensors[names[0]].nbytes for names, _ in sources)

    @contextlib.contextmanager
    def layer(self, number: int) -> Iterator[nn.Module]:
        """A decoder layer, which has its weights inside."""
        with self._in_memory(self.sources[number]):
            yield self.layers[number]

    @contextlib.contextmanager
    def around(
        self, enter: Callable[[Tensor], Tensor] = lambda state: state
    ) -> Iterator[nn.Module]:
        """The model with all weights but those of its layers, which do nothing inside.

        Args:
            enter: makes what the first layer returns of what it is called with.
        """
        with contextlib.ExitStack() as changes:
            changes.enter_context(self._in_memory(self._around))
            for number, layer in enumerate(self.layers):
                made = enter if number == 0 else _unchanged
                vars(layer)["forward"] = partial(_passed, made)
                changes.callback(vars(layer).pop, "forward")
            yield self.model

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    @contextlib.contextmanager
    def _in_memory(self, sources: Sequence[TensorSource]) -> Iterator[None]:
        """Give tensors of the model their values, and take them away again."""
        try:
            for names, source in sources:
                empty = self._tensors[names[0]]
                filled = read_tensor(names[0], empty, source, self._reader, self.device)
                for name in names:
                    put_tensor(self.model, name, _like(empty, filled))
            yield
        finally:
            for names, _ in sources:
                for name in names:
                    put_tensor(self.model, name, self._tensors[names[0]])


def _outermost(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Layers, without those that are inside of others."""
    inside = {id(m) for layer in layers for m in layer.modules() if m is not layer}
    return [layer for layer in layers if id(layer) not in inside]


def _like(empty: Tensor, filled: Tensor) -> Tensor:
    """Values as a parameter, without a gradient, or as a buffer."""
    is_parameter = isinstance(empty, nn.Parameter)
    return nn.Parameter(filled, requires_grad=False) if is_parameter else filled


def _unchanged(state: Tensor) -> Tensor:
    return state


def _passed(made: Callable[[Tensor], Tensor], state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a decoder layer that is not run."""
    return made(state)
