"""Masks of a model under the names, and in the shapes, that transformers would save them.

``save_pretrained`` undoes the conversions of a checkpoint on loading: one tensor of the
model becomes several in the files, or the other way round. Masks are converted in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from distprune._common.selecting import natural_key
from distprune._transformers.mask_matching import Shape
from distprune._transformers.table import (
    Conversion,
    Input,
    Shapes,
    computing_step,
    pretrained_model,
    renamed_by,
    renamings_and_converters,
    transforms_of,
)


@dataclass(frozen=True)
class SavedMasks:
    """The masks of one parameter, or of several that are saved together.

    Attributes:
        parameters: the parameters that have a mask.
        tensors: shapes of the converted masks, by name in the checkpoint.
        conversion: converts the masks; None if one mask is saved unchanged.
        renamed: from the conversion's names to those of the checkpoint.
    """

    parameters: tuple[str, ...]
    tensors: dict[str, Shape]
    conversion: Conversion | None
    renamed: dict[str, str]

    def make(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The masks by their names in the checkpoint, bool.

        Args:
            masks: whole masks by parameter.
        """
        assert self.conversion is not None
        converted = self.conversion.masks(masks.__getitem__)
        return {self.renamed[name]: mask for name, mask in converted.items()}


def as_saved(
    model: nn.Module, parameters: Mapping[str, Shape], masked: Collection[str]
) -> list[SavedMasks]:
    """How transformers would save the masks of a model; unchanged if it is not one of its models.

    Args:
        model: wrapped or not.
        parameters: shapes of all parameters, by name.
        masked: names of the parameters that have a mask.

    Raises:
        NotImplementedError: a conversion cannot be undone on a mask; names the parameter.
    """
    pretrained = pretrained_model(model)
    if pretrained is None:
        return [_unchanged(name, name, parameters) for name in masked]
    renamings, converters = _backwards(pretrained)
    saved: list[SavedMasks] = []
    groups: dict[tuple[str, int], list[Input]] = {}
    # In the order in which transformers visits a state dict: some renamings depend on it.
    for name in sorted(parameters, key=natural_key):
        for position, converter in enumerate(converters):
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                mask = name if name in masked else None
                member = Input(name, pattern, mask, parameters[name])
                groups.setdefault((target, position), []).append(member)
                break
        else:
            renamed = renamed_by(renamings, name)
            if name in masked:
                saved.append(_unchanged(name, renamed, parameters))
    stand_in = Shapes(parameters)
    for (target, position), inputs in groups.items():
        names = tuple(source.name for source in inputs if source.name is not None)
        if names:
            conversion = Conversion(
                target, converters[position], inputs, pretrained.config, stand_in
            )
            saved.append(_converted(conversion, names, renamings))
    return saved


def _unchanged(name: str, saved_name: str, parameters: Mapping[str, Shape]) -> SavedMasks:
    return SavedMasks((name,), {saved_name: parameters[name]}, None, {})


def _converted(conversion: Conversion, names: tuple[str, ...], renamings: list[Any]) -> SavedMasks:
    computing = computing_step(conversion.converter)
    if computing is not None:
        raise NotImplementedError(
            f"{names[0]}: transformers saves it by {computing}, which may do more than move "
            "elements; expected names='model', which leaves masks as they are."
        )
    shapes = conversion.shapes()
    renamed = {name: renamed_by(renamings, name) for name in shapes}
    tensors = {renamed[name]: shape for name, shape in shapes.items()}
    return SavedMasks(names, tensors, conversion, renamed)


def _backwards(model: Any) -> tuple[list[Any], list[Any]]:
    """The renamings and the conversions of saving, in order."""
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # the model was not loaded; then transformers adds no prefix on saving
        table = transforms_of(model, add_legacy=False)
        transforms = [step for step in table if type(step).__name__ != "PrefixChange"]
    try:
        reverse = [copy.deepcopy(step).reverse_transform() for step in reversed(transforms)]
    except NotImplementedError as error:
        raise NotImplementedError(
            "a conversion of this model has no reverse, so transformers does not save it as it "
            "was; expected names='model', which leaves masks as they are."
        ) from error
    return renamings_and_converters(reverse)
