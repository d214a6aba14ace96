"""A language model in a folder, of which one decoder layer is in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.naming import named_modules
from distprune._common.process_groups import world
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
    stored_dtype,
    untie_different,
)
from distprune.streaming.parts import Holding, Wanted, WeightParts

_ALONE = Holding()


class StreamedModel:
    """The model of a folder: its decoder layers are read when they are needed, and freed after.

    Args:
        checkpoint: its headers were read.
        dtype: of the parameters; None: that of the config, else of the first weights.
        device: where layers run.
        holding: how the ranks come by the weights of a layer.

    Attributes:
        model: of transformers. Parameters that are not in memory are on the meta device.
        layers: its decoder layers, in the order in which they run.
        sources: of each layer, which tensors of the checkpoint make which of its tensors.
        holding: how the ranks come by the weights of a layer.

    Raises:
        ValueError: tensors are missing, or have another shape; no decoder layers are known.
        NotImplementedError: a model whose layers share parameters, or are no decoder; as
            ``load_sharded``.
        ImportError: the extra ``language-models`` is not installed.

    Cost: no memory for parameters.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None,
        device: torch.device,
        holding: Holding = _ALONE,
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
        self.hold(holding)

    def hold(self, holding: Holding) -> None:
        """Come by weights in another way from now on; what was kept is forgotten."""
        self.holding = holding
        self._parts = WeightParts(self._reader, self.device, holding, world())
        self._has_around = False

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that this rank has read so far."""
        return self._reader.bytes_read

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
        """A decoder layer, which has its weights inside. Collective if ranks share the reading."""
        with self._in_memory(self.sources[number]):
            yield self.layers[number]

    @contextlib.contextmanager
    def weights_around(self) -> Iterator[None]:
        """Have all weights but those of layers inside. Collective if ranks share the reading."""
        with self._in_memory(self._around):
            self._has_around = True
            try:
                yield
            finally:
                self._has_around = False

    @contextlib.contextmanager
    def around(
        self, enter: Callable[[Tensor], Tensor] = lambda state: state
    ) -> Iterator[nn.Module]:
        """The model, whose layers do nothing inside; :meth:`weights_around`, if they are not there.

        Args:
            enter: makes what the first layer returns of what it is called with.
        """
        with contextlib.ExitStack() as changes:
            if not self._has_around:
                changes.enter_context(self.weights_around())
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
        wanted = [Wanted(names[0], self._tensors[names[0]], source) for names, source in sources]
        try:
            filled = self._parts.read(wanted)
            for (names, _), (_, empty, _) in zip(sources, wanted, strict=True):
                values = _like(empty, filled.pop(0))
                for name in names:
                    put_tensor(self.model, name, values)
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
