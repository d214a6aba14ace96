"""A language model in a folder, of which one decoder layer is in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distprune._transformers.building import (
    build_without_weights,
    put_tensor,
    tensors_of_checkpoints,
)
from distprune._transformers.loading import MaskSource, SameTensor
from distprune._transformers.table import SavedMasks, as_saved
from distprune.base.naming import NamedParameter, named_modules
from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.errors import SelectionError
from distprune.files.selecting import select_tensors
from distprune.language_models.calibrating import decoder_blocks
from distprune.recipes import Recipe
from distprune.streaming.reading import (
    TensorReader,
    TensorSource,
    dtype_of,
    find_sources,
    stored_dtype,
    untie_different,
)

Keep = Callable[[str], Tensor]  # from the name of a tensor to its mask


class StreamedModel:
    """The model of a folder: its decoder layers are read when they are needed, and freed after.

    Args:
        folder: with config.json and safetensors files, or the name of a model in the local Hugging
            Face cache.
        dtype: of the parameters; None: that of the config, else of the first weights.
        device: where layers run.

    Attributes:
        checkpoint: of the folder.
        model: of transformers. Parameters that are not in memory are on the meta device.
        layers: its decoder layers, in the order in which they run.
        sources: of each layer, which tensors of the checkpoint make which of its tensors.

    Raises:
        CheckpointError: the folder does not exist or is damaged.
        ValueError: tensors are missing, or have another shape; no decoder layers are known.
        NotImplementedError: a model whose layers share parameters, or are no decoder; as
            ``load_sharded``.
        ImportError: the extra ``language-models`` is not installed.

    Cost: no memory for parameters.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.checkpoint = checkpoint = open_checkpoint(folder)
        self.device = device
        self.model = build_without_weights(checkpoint.folder, dtype or stored_dtype(checkpoint))
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise NotImplementedError(
                f"{checkpoint.folder}: {type(self.model).__name__} has an encoder, and so is no "
                "chain of decoder layers; expected a decoder. Load it with load_sharded."
            )
        untie_different(self.model, checkpoint)
        found = find_sources(self.model, checkpoint)
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
        self._reader = TensorReader(checkpoint)
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
        """A decoder layer, which has its weights inside."""
        with self._in_memory(self.sources[number]):
            yield self.layers[number]

    @contextlib.contextmanager
    def weights_around(self) -> Iterator[None]:
        """Have all weights but those of layers inside."""
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

    @contextlib.contextmanager
    def _in_memory(self, sources: Sequence[TensorSource]) -> Iterator[None]:
        """Give tensors of the model their values, and take them away again."""
        try:
            filled = self._read(sources)
            for names, _ in sources:
                values = _like(self._tensors[names[0]], filled.pop(0))
                for name in names:
                    put_tensor(self.model, name, values)
            yield
        finally:
            for names, _ in sources:
                for name in names:
                    put_tensor(self.model, name, self._tensors[names[0]])

    def _read(self, sources: Sequence[TensorSource]) -> list[Tensor]:
        """The values of tensors, in memory of their own."""
        values = [torch.empty_like(self._tensors[n], device=self.device) for (n, *_), _ in sources]
        for value, (_, source) in zip(values, sources, strict=True):
            self._reader.read_from(source, value)
        return values


class StoredLayers:
    """How the parameters of a streamed model's layers lie in its checkpoint.

    Args:
        streamed: the model.
        recipe: says which tensors of the checkpoint are pruned.

    Attributes:
        parameters: of each layer, the parameters that have such tensors.

    Raises:
        SelectionError: a pruned tensor is in no decoder layer; as ``select_tensors``.
        NotImplementedError: transformers computes with a tensor when it loads or saves it.
    """

    def __init__(self, streamed: StreamedModel, recipe: Recipe) -> None:
        groups = zip(recipe.parts, select_tensors(streamed.checkpoint, recipe).groups, strict=True)
        # By the names of pruned tensors, what ranks them.
        self._scores = {entry.name: part.score for part, entries in groups for entry in entries}
        wanted, found = set(self._scores), set[str]()
        model = streamed.model
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._saved = {
            name: saved for saved in as_saved(model, shapes, shapes) for name in saved.parameters
        }
        self._sources: dict[str, MaskSource] = {}
        self._entries = {entry.name: entry for entry in streamed.checkpoint.tensors}
        self.parameters: list[list[NamedParameter]] = []
        for sources in streamed.sources:
            of_layer = []
            for (name, *_), source in sources:
                if wanted.isdisjoint(source.names):
                    continue
                path, _, leaf = name.rpartition(".")
                of_layer.append(NamedParameter(model.get_submodule(path), leaf, name))
                self._sources[name] = source
                found |= wanted & set(source.names)
                self._check(name)
            self.parameters.append(of_layer)
        if missing := sorted(wanted - found):
            raise SelectionError(
                f"{missing[0]} is in no decoder layer, so that no text is run through it alone; "
                "expected tensors of decoder layers. Exclude it."
            )

    def mask(self, name: str, keep: Keep) -> Tensor:
        """The mask of a parameter, bool; what has no mask is kept."""

        def read(stored: str) -> Tensor:
            if stored in self._scores:
                return keep(stored).view(self._entries[stored].shape)
            return torch.ones(self._entries[stored].shape, dtype=torch.bool)

        source = self._sources[name]
        return read(source.name) if isinstance(source, SameTensor) else source.read(read)

    def stored(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the checkpoint that some parameters are saved as, in its dtypes."""
        return {
            name: value.to(dtype_of(self._entries[name]))
            for name, value in self._as_saved(values).items()
            if name in self._scores
        }

    def scores(self, values: Mapping[str, Tensor], score: str) -> dict[str, Tensor]:
        """Scores of parameters by the tensors of the checkpoint that are ranked by this score."""
        saved = self._as_saved(values)
        return {name: value for name, value in saved.items() if self._scores.get(name) == score}

    def num_scored(self, scores: Collection[str]) -> int:
        """How many elements are ranked by any of these scores."""
        entries = self._entries
        return sum(entries[name].numel for name, score in self._scores.items() if score in scores)

    def numel(self, name: str) -> int:
        """Elements of a tensor of the checkpoint."""
        return self._entries[name].numel

    def _as_saved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of parameters, as transformers saves them."""
        found: dict[str, Tensor] = {}
        for name, value in values.items():
            saved = self._saved[name]
            if saved.conversion is None:
                found[next(iter(saved.tensors))] = value
            elif name == saved.parameters[0]:
                found |= saved.make(values)
        return found

    def names_of(self, number: int) -> list[str]:
        """The pruned tensors of a layer, as the checkpoint names them."""
        names = [name for p in self.parameters[number] for name in self._sources[p.fqn].names]
        return [name for name in names if name in self._scores]

    def _check(self, name: str) -> None:
        """Check that a parameter is saved as the tensors from which it was read."""
        saved: SavedMasks | None = self._saved.get(name)
        read = set(self._sources[name].names)
        if saved is None or not read <= set(saved.tensors):
            written = [] if saved is None else sorted(saved.tensors)
            raise NotImplementedError(
                f"{name} is made of {sorted(read)[0]}, and transformers saves it as "
                f"{written[0] if written else 'nothing'}; expected a checkpoint that transformers "
                "writes. Load it, and save it with save_pretrained."
            )


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
