"""One decoder layer: its masks, from those of the checkpoint, and its weights, moved by them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from distprune._common.naming import NamedParameter
from distprune._transformers.mask_matching import MaskSource, SameTensor
from distprune._transformers.saving import SavedMasks, as_saved
from distprune.api.local import custom_from_mask, remove
from distprune.files.checkpoints.header import make_header
from distprune.files.disk.access import write_atomically
from distprune.files.errors import SelectionError
from distprune.files.recipe import FileRecipe
from distprune.files.selecting import select_tensors
from distprune.language_models.loading import DTYPES, dtype_of
from distprune.reconstruction.reconstructing import reconstruct
from distprune.reconstruction.report import ReconstructedParameter
from distprune.statistics.gram import GramMatrices
from distprune.streaming.layers import StreamedModel
from distprune.streaming.windows import WindowStream

Keep = Callable[[str], Tensor]  # from the name of a tensor to its mask


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

    def __init__(self, streamed: StreamedModel, recipe: FileRecipe) -> None:
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


def prune_layer(
    stored: StoredLayers,
    number: int,
    keep: Keep,
    stream: WindowStream | None,
    damping: float,
) -> tuple[dict[str, Tensor], list[ReconstructedParameter]]:
    """Prune a layer, which is in memory, and move its kept weights. Collective.

    Args:
        stored: of the model.
        number: of the layer.
        keep: the masks.
        stream: the windows whose outputs are to change least; None: weights stay where they are.
        damping: as for ``reconstruct``.

    Returns:
        The tensors of the checkpoint that have changed, if weights were moved; and the errors of
        outputs. The layer has the weights that a checkpoint with these tensors has.
    """
    parameters = stored.parameters[number]
    grams = None
    if stream is not None and parameters:
        grams = GramMatrices(parameters, allow_empty="*")
        stream.collect(number, grams)
    for parameter in parameters:
        mask = stored.mask(parameter.fqn, keep)
        custom_from_mask(*parameter, mask.to(_weight(parameter).device))
    errors: list[ReconstructedParameter] = []
    if grams is not None:
        errors += reconstruct(parameters, grams, damping=damping).parameters
    for parameter in parameters:
        remove(*parameter)
    if grams is None:
        return {}, []
    made = stored.stored({p.fqn: _weight(p).detach().cpu() for p in parameters})
    _round(parameters, {tensor.dtype for tensor in made.values()})
    return made, errors


def _weight(parameter: NamedParameter) -> Tensor:
    weight: Tensor = getattr(*parameter)
    return weight


def _round(parameters: Sequence[NamedParameter], dtypes: Collection[torch.dtype]) -> None:
    """Give parameters values that the dtypes of the checkpoint can hold."""
    with torch.no_grad():
        for parameter in parameters:
            for dtype in dtypes:
                weight = _weight(parameter)
                weight.copy_(weight.to(dtype))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    described = {
        name: (names[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }
    header, _ = make_header(described, {"format": "pt"})
    parts = (
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for tensor in tensors.values()
    )
    write_atomically(path, [header, *parts])
