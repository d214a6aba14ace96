"""A language model in a folder, of which one decoder layer is in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distprune._transformers import (
    MaskSource,
    as_saved,
    build_without_weights,
    match_masks,
    names_by_tensor,
    put_tensor,
    tensors_of_checkpoints,
)
from distprune.api.select import head_of
from distprune.base.naming import NamedParameter, named_modules
from distprune.base.selecting import TORCH_NAMES
from distprune.files.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from distprune.files.disk import read_into
from distprune.files.errors import CheckpointError, SelectionError
from distprune.files.selecting import select_tensors
from distprune.files.statistics_file import origins_of
from distprune.language_models.calibrating import decoder_blocks
from distprune.language_models.hidden_states import HiddenStates
from distprune.language_models.running import output_of
from distprune.recipes import Recipe

# All names of a parameter or persistent buffer, and what it is read from.
Source = tuple[list[str], MaskSource]


class StreamedModel:
    """The model of a folder: its decoder layers are read when they are needed, and freed after.

    Args:
        folder: with config.json and safetensors files, or the name of a model in the local Hugging
            Face cache.
        dtype: of the parameters; None: that of the config, else of the first weights.
        device: where layers run.

    Attributes:
        checkpoint: of the folder.
        entries: the tensors of the checkpoint, by name.
        model: of transformers. Parameters that are not in memory are on the meta device.
        layers: its decoder layers, in the order in which they run.
        sources: of each layer, which tensors of the checkpoint make which of its tensors; last, of
            what is around the layers.

    Raises:
        CheckpointError: the folder does not exist or is damaged.
        ValueError: tensors are missing, or have another shape; no decoder layers are known.
        NotImplementedError: a model whose layers share parameters, or are no decoder, or no chain;
            as ``load_sharded``.
        ImportError: the extra ``language-models`` is not installed.

    Cost: no memory for parameters.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype | None, device: torch.device) -> None:
        self.checkpoint = checkpoint = open_checkpoint(folder)
        self.entries = {entry.name: entry for entry in checkpoint.tensors}
        self.device = device
        self.model = build_without_weights(checkpoint.folder, dtype or _stored_dtype(checkpoint))
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise NotImplementedError(
                f"{checkpoint.folder}: {type(self.model).__name__} has an encoder, and so is no "
                "chain of decoder layers; expected a decoder. Load it with load_sharded."
            )
        self._untie_different()
        blocks = decoder_blocks(self.model)
        inside = {id(m) for block in blocks for m in block.modules() if m is not block}
        self.layers = [block for block in blocks if id(block) not in inside]
        paths = {id(module): path for path, module in named_modules(self.model)}
        prefixes = [f"{paths[id(layer)]}." for layer in self.layers]
        self.sources: list[list[Source]] = [[] for _ in [*prefixes, "around"]]
        for names, source in self._find_sources():
            numbers = {
                next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), -1)
                for name in names
            }
            if len(numbers) > 1:
                raise NotImplementedError(
                    f"{names[0]} and {names[-1]} are one parameter, and are not in the same "
                    "decoder layer; expected layers with parameters of their own. Load the model "
                    "with load_sharded."
                )
            self.sources[numbers.pop()].append((names, source))
        for name, buffer in list(self.model.named_buffers()):
            if not buffer.is_meta:
                put_tensor(self.model, name, buffer.to(device))
        self._tensors = dict(tensors_of_checkpoints(self.model))
        self._find_chain()

    def num_bytes(self, number: int) -> int:
        """Bytes of a layer, or of all that is around the layers (-1)."""
        return sum(self._tensors[names[0]].nbytes for names, _ in self.sources[number])

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The model with all of its weights."""
        with contextlib.ExitStack() as stack:
            for number in range(-1, len(self.layers)):
                stack.enter_context(self.layer(number))
            yield self.model

    @contextlib.contextmanager
    def around(
        self, enter: Callable[[Tensor], Tensor] = lambda state: state
    ) -> Iterator[nn.Module]:
        """The model with all weights but those of its layers, which do nothing inside.

        Args:
            enter: makes what the first layer returns of what it is called with.
        """
        with self.layer(-1), self.through(enter):
            yield self.model

    @contextlib.contextmanager
    def through(self, enter: Callable[[Tensor], Tensor] = lambda state: state) -> Iterator[None]:
        """Make layers return what they are called with, and the first one ``enter`` of it."""
        with contextlib.ExitStack() as changes:
            for number, layer in enumerate(self.layers):

                def forward(hidden: Tensor, /, *_: Any, number: int = number, **__: Any) -> Any:
                    hidden = hidden if number else enter(hidden)
                    rest = (None,) * (self._num_returned - 1)
                    return (hidden, *rest) if self._num_returned else hidden

                vars(layer)["forward"] = forward
                changes.callback(vars(layer).pop, "forward")
            yield

    def _find_chain(self) -> None:
        """Find out what layers return: a tensor, or a tuple of so many elements, it first.

        It runs the model on two tokens, with numbers that take no memory in place of the weights
        around the layers; the head, which could be large, does nothing.

        Raises:
            NotImplementedError: layers are no chain: see hidden_states.[Note: a chain].
        """
        error: Exception | None = None
        head = head_of(self.model)

        def run() -> None:
            with contextlib.ExitStack() as changes:
                if head is not None:
                    vars(head)["forward"] = lambda state: state
                    changes.callback(vars(head).pop, "forward")
                tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
                output_of(self.model, tokens)

        for self._num_returned in range(4):
            states = HiddenStates(self.layers)
            try:
                with torch.no_grad(), self.layer(-1, are_made_up=True), self.through():
                    states.catch(run)
            except Exception as raised:
                error = error or raised
                states.is_chain = False
            if states.is_chain:
                break
        self.check_chain(states, error)

    def check_chain(self, states: HiddenStates, error: Exception | None = None) -> None:
        """Raise NotImplementedError if layers turned out to be no chain, or of an error."""
        if not states.is_chain or states.shares_objects:
            raise NotImplementedError(
                f"the decoder layers of {type(self.model).__name__} are no chain: expected that "
                "each is called with what the one before it returned, and with arguments that it "
                "does not change. Load the model whole, with load_sharded."
            ) from error

    @contextlib.contextmanager
    def layer(self, number: int, are_made_up: bool = False) -> Iterator[None]:
        """Inside, a decoder layer, or what is around the layers (-1), has its values in memory.

        Args:
            are_made_up: other values that take no memory.
        """
        try:
            for n, (names, source) in enumerate(self.sources[number]):
                empty = self._tensors[names[0]]
                if are_made_up:  # each another number: of equal ones, a norm changes nothing
                    values = empty.new_full((), 1 / (n + 2), device=self.device).expand(empty.shape)
                else:
                    values = self.values_of(source, empty)
                if isinstance(empty, nn.Parameter):
                    values = nn.Parameter(values, requires_grad=False)
                for name in names:
                    put_tensor(self.model, name, values)
            yield
        finally:
            for names, _ in self.sources[number]:
                for name in names:
                    put_tensor(self.model, name, self._tensors[names[0]])

    def values_of(self, source: MaskSource, like: Tensor) -> Tensor:
        """Read a tensor of the model from where it is stored, in the dtype of another one."""
        if source.conversion is None or not source.conversion.is_stack:
            return source.read(self.read).to(self.device, like.dtype)
        values = torch.empty_like(like, device=self.device)
        for expert in range(len(values)):  # one by one: together they take twice the memory
            values[expert] = source.read(self.read, range(expert, expert + 1))[0]
        return values

    def read(self, name: str) -> Tensor:
        """A tensor of the checkpoint, on the CPU.

        Raises:
            CheckpointError: the file is gone, shorter than it was, or cannot be read.
        """
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=dtype_of(entry))
        read_into(entry.path, [(entry.start, out.view(-1).view(torch.uint8).numpy().data)])
        return out

    def _untie_different(self) -> None:
        """Untie parameters that the checkpoint stores with different values, as transformers."""
        for names in names_by_tensor(tensors_of_checkpoints(self.model)):
            first, *others = [name for name in names if name in self.entries] or names[:1]
            for other in others:
                same_dtype = self.entries[first].dtype == self.entries[other].dtype
                if not (same_dtype and torch.equal(self.read(first), self.read(other))):
                    untied = nn.Parameter(torch.empty_like(self.model.get_parameter(other)))
                    put_tensor(self.model, other, untied)
                    self.model.all_tied_weights_keys.pop(other, None)

    def _find_sources(self) -> list[Source]:
        """What each tensor of the model is read from, as ``from_pretrained`` does.

        Tied parameters of which the checkpoint holds only one are left tied.
        """
        tensors = dict(tensors_of_checkpoints(self.model))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        stored = {name: entry.shape for name, entry in self.entries.items()}
        matching = match_masks(stored, shapes, self.model, is_checkpoint=True)
        # As from_pretrained: saving undoes the conversions that were used.
        self.model._weight_conversions = matching.used
        found = []
        for names in names_by_tensor(tensors.items()):
            sources = [matching.sources[name] for name in names if name in matching.sources]
            if not sources:
                reason = matching.mismatched.get(names[0], f"{names[0]} is missing")
                raise ValueError(
                    f"{self.checkpoint.folder} does not fit {type(self.model).__name__}, the model "
                    f"of its config.json: {reason}; expected a complete checkpoint of this model."
                )
            found.append((names, sources[0]))
        return found


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
        # By the names of pruned tensors, what ranks them.
        self._scores = {
            entry.name: recipe.parts[group].score
            for entry, group, _ in select_tensors(streamed.checkpoint, recipe)[0]
            if group is not None
        }
        model = streamed.model
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._saved = {
            name: saved for saved in as_saved(model, shapes, shapes) for name in saved[0]
        }
        self._sources: dict[str, MaskSource] = {}
        self._entries = streamed.entries
        self.parameters: list[list[NamedParameter]] = []
        missing = set(self._scores)
        for sources in streamed.sources[:-1]:
            of_layer = []
            for (name, *_), source in sources:
                pruned = [each for each in source.names if each in self._scores]
                if pruned:
                    written = sorted(self._saved[name][1]) if name in self._saved else []
                    if not set(source.names) <= set(written):
                        raise NotImplementedError(
                            f"{name} is made of {source.names[0]}, and transformers saves it as "
                            f"{written}; expected a checkpoint that transformers writes. Load it, "
                            "and save it with save_pretrained."
                        )
                    path, _, leaf = name.rpartition(".")
                    of_layer.append(NamedParameter(model.get_submodule(path), leaf, name))
                    self._sources[name] = source
                    missing -= set(pruned)
            self.parameters.append(of_layer)
        if missing:
            raise SelectionError(
                f"{min(missing)} is in no decoder layer, so that no text is run through it alone; "
                "expected tensors of decoder layers. Exclude it."
            )

    def statistics_names(self) -> dict[str, str]:
        """What statistics of each parameter are called, so that its tensors find them.

        They have the names of parameters, unless those of tensors do not tell one of these.

        Raises:
            NotImplementedError: a parameter is a part of a tensor, or made of others than experts.
        """
        names, are_told = {}, True
        for name, source in self._sources.items():
            found, end = [o[0] for o in origins_of(source.names[0])], name.split(".")[-2:]
            are_told &= any(f".{name}".endswith(f".{origin}") for origin in found)
            fitting = [origin for origin in found if origin.split(".")[-2:] == end]
            if source.conversion is not None and not fitting:
                raise NotImplementedError(
                    f"{name} is made of {source.names[0]}, of which no statistics are collected; "
                    "expected a tensor of one parameter, or of one expert. Exclude it."
                )
            names[name] = source.names[0] if source.conversion is None else fitting[0]
        return {name: name for name in names} if are_told else names

    def mask(self, name: str, keep: Callable[[str], Tensor]) -> Tensor:
        """The mask of a parameter, bool, from those of tensors; what has no mask is kept."""

        def read(stored: str) -> Tensor:
            if stored in self._scores:
                return keep(stored).view(self._entries[stored].shape)
            return torch.ones(self._entries[stored].shape, dtype=torch.bool)

        return self._sources[name].read(read)

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

    def num_scored(self, scores: list[str]) -> int:
        """How many elements are ranked by any of these scores."""
        ranked = (name for name, score in self._scores.items() if score in scores)
        return sum(self._entries[name].numel for name in ranked)

    def _as_saved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of parameters, as transformers saves them."""
        found: dict[str, Tensor] = {}
        for name, value in values.items():
            parameters, tensors, conversion = self._saved[name]
            if conversion is None:
                found[next(iter(tensors))] = value
            elif name == parameters[0]:
                made = conversion.masks(values.__getitem__).values()
                found |= dict(zip(tensors, made, strict=True))
        return found


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """The dtype of the weights where the config does not say one."""
    if checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"):
        return None
    dtypes = map(dtype_of, checkpoint.tensors)
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """The torch dtype of a tensor in a file.

    Raises:
        CheckpointError: torch has none.
    """
    dtype: torch.dtype | None = getattr(torch, TORCH_NAMES.get(entry.dtype, ""), None)
    if dtype is None:
        raise CheckpointError(
            f"torch {torch.__version__} has no dtype {entry.dtype}, which {entry.name} has."
        )
    return dtype
