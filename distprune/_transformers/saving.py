"""Masks of a model under the names, and in the shapes, that transformers would save them.

``save_pretrained`` undoes what was done to a checkpoint on loading: what is one tensor in the
model is several in the files, or the other way round. A mask for the files goes the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.natural_order import natural_key
from distprune._transformers.mask_matching import Shape
from distprune._transformers.table import (
    Conversion,
    Input,
    Shapes,
    only_moves,
    pretrained_model,
    transforms_of,
)


@dataclass(frozen=True)
class SavedMasks:
    """The masks of one parameter, or of several that are saved together.

    Attributes:
        parameters: those that have a mask.
        tensors: shapes, by name in the checkpoint, of what is made of them.
        conversion: what makes it; None if one mask is saved as it is.
        renamed: from the conversion's names to those of the checkpoint.
    """

    parameters: tuple[str, ...]
    tensors: dict[str, Shape]
    conversion: Conversion | None
    renamed: dict[str, str]

    def make(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Masks by their names in the checkpoint, bool, from whole ones by parameter."""
        assert self.conversion is not None

        def tensor_of(each: Input) -> Tensor:
            if each.name is None:
                return torch.ones(each.shape, dtype=torch.bool)
            return masks[each.name]

        made = self.conversion.run(tensor_of)
        return {self.renamed[name]: mask for name, mask in made.items()}


def as_saved(
    model: nn.Module, parameters: Mapping[str, Shape], masked: Collection[str]
) -> list[SavedMasks]:
    """How transformers would save the masks of a model; as they are, if it is none of its models.

    Args:
        model: wrapped or not.
        parameters: all of them: shapes, by name.
        masked: names of those that have a mask.

    Raises:
        NotImplementedError: a conversion cannot be undone on a mask; named.
    """
    pretrained = pretrained_model(model)
    if pretrained is None:
        return [_unchanged(name, name, parameters) for name in masked]
    renamings, converters = _backwards(pretrained)
    saved: list[SavedMasks] = []
    groups: dict[tuple[str, int], list[Input]] = {}
    # In the order in which transformers goes over a state dict: some renamings depend on it.
    for name in sorted(parameters, key=natural_key):
        for which, converter in enumerate(converters):
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                mask = name if name in masked else None
                member = Input(name, pattern, mask, parameters[name])
                groups.setdefault((target, which), []).append(member)
                break
        else:
            renamed = _renamed(name, renamings)
            if name in masked:
                saved.append(_unchanged(name, renamed, parameters))
    stand_in = Shapes(parameters)
    for (target, which), inputs in groups.items():
        names = tuple(each.name for each in inputs if each.name is not None)
        if names:
            conversion = Conversion(target, converters[which], inputs, pretrained.config, stand_in)
            saved.append(_converted(conversion, names, renamings))
    return saved


def _unchanged(name: str, saved_name: str, parameters: Mapping[str, Shape]) -> SavedMasks:
    return SavedMasks((name,), {saved_name: parameters[name]}, None, {})


def _converted(conversion: Conversion, names: tuple[str, ...], renamings: list[Any]) -> SavedMasks:
    computing = [each for each in conversion.converter.operations if not only_moves(each)]
    if computing:
        raise NotImplementedError(
            f"{names[0]}: transformers saves it by {type(computing[0]).__name__}, which may do "
            "more than move elements; expected names='model', which leaves masks as they are."
        )
    shapes = conversion.shapes()
    renamed = {name: _renamed(name, renamings) for name in shapes}
    tensors = {renamed[name]: shape for name, shape in shapes.items()}
    return SavedMasks(names, tensors, conversion, renamed)


def _backwards(model: Any) -> tuple[list[Any], list[Any]]:
    """The renamings and the conversions of saving, in order."""
    used = getattr(model, "_weight_conversions", None)
    if used is None:  # it was not loaded; then transformers adds no prefix that it may not have had
        listed = transforms_of(model, add_legacy=False)
        used = [each for each in listed if type(each).__name__ != "PrefixChange"]
    try:
        reverse = [copy.deepcopy(each).reverse_transform() for each in reversed(used)]
    except NotImplementedError as error:
        raise NotImplementedError(
            "a conversion of this model has no reverse, so transformers does not save it as it "
            "was; expected names='model', which leaves masks as they are."
        ) from error
    converters = [each for each in reverse if hasattr(each, "operations")]
    return [each for each in reverse if not hasattr(each, "operations")], converters


def _renamed(name: str, renamings: list[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
