"""Find the parameters of a model to which the masks of a file belong.

A mask has the name of a tensor of a checkpoint, or of a parameter of the model from which it was
saved. :func:`match_masks` finds the parameter by this name alone, or as transformers would load
it: the name of a mask goes through the same renamings as its tensor's, and its elements through the
same operations, which work on booleans as long as they only move elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from distprune._transformers.table import (
    Conversion,
    Input,
    Shape,
    Shapes,
    computing_step,
    pretrained_model,
    renamed_by,
    renamings_and_converters,
    transforms_of,
)
from distprune.base.selecting import natural_key

# From a name in the file to the whole mask, bool, of its shape in the file.
ReadMask = Callable[[str], Tensor]


@dataclass(frozen=True)
class SameTensor:
    """A mask of the file that applies to the parameter unchanged.

    Attributes:
        name: of the mask.
    """

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, read_mask: ReadMask) -> Tensor:
        return read_mask(self.name)


@dataclass
class Converted:
    """A mask that a conversion makes from one or several.

    Attributes:
        conversion: makes the mask.
        target: name of the parameter, among those that the conversion makes.
    """

    conversion: Conversion
    target: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.conversion.inputs if s.name is not None)

    def read(self, read_mask: ReadMask, rows: range | None = None) -> Tensor:
        """The whole, or some rows of it if the conversion is a stack."""
        return self.conversion.masks(read_mask, rows)[self.target]


# The origin of one parameter's mask: names of masks in the file, and how it is made of them.
MaskSource = SameTensor | Converted


@dataclass
class Matching:
    """The result of :func:`match_masks`.

    Attributes:
        sources: the origin of each parameter's mask, by parameter.
        unexpected: masks without a parameter: the reason, or "", by name of the mask.
        mismatched: masks of another shape than their parameter: the difference, by name.
    """

    sources: dict[str, MaskSource] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, shape: Shape, parameter: str, expected: Shape) -> None:
        """Assign a mask to a parameter, unchanged; if there are several, the first one counts."""
        if parameter in self.sources:
            first = ", ".join(self.sources[parameter].names[:3])
            self.unexpected[name] = f"{parameter} has the mask {first}"
        elif shape != expected:
            mask = "its mask" if name == parameter else f"its mask {name}"
            self.mismatched[name] = f"{parameter} has shape {expected}; {mask} has {shape}"
        else:
            self.sources[parameter] = SameTensor(name)


def rules_for(model: nn.Module) -> TransformersRules | None:
    """The rules by which transformers loads a model's checkpoints; None for other models.

    Args:
        model: wrapped or not.
    """
    pretrained = pretrained_model(model)
    return None if pretrained is None else TransformersRules(pretrained)


class TransformersRules:
    """The changes that transformers makes to a checkpoint when it loads it into a model.

    Args:
        model: a transformers model, unwrapped; modules below it may be wrapped.
    """

    def __init__(self, model: Any) -> None:
        self._config = model.config
        self._prefix: str = model.base_model_prefix
        self._transforms = transforms_of(model)
        self._renamings, self._converters = renamings_and_converters(self._transforms)

    def used(self) -> list[Any]:
        """The transforms that have changed a name in :meth:`match`, as transformers records them.

        Their reverse is what ``save_pretrained`` applies.
        """
        return [step for step in self._transforms if step.was_used()]

    def with_other_prefix(self, name: str, parameters: Mapping[str, Shape]) -> str | None:
        """The parameter's name with the base model's prefix added or removed; None without one."""
        if not self._prefix:
            return None
        shorter = name.removeprefix(f"{self._prefix}.")
        for other in (shorter if shorter != name else None, f"{self._prefix}.{name}"):
            if other is not None and other in parameters:
                return other
        return None

    def match(
        self, masks: Mapping[str, Shape], parameters: Mapping[str, Shape], others: Iterable[str]
    ) -> Matching:
        """Find the parameters of masks that have the names of a checkpoint.

        Args:
            masks: shapes, by name in the checkpoint.
            parameters: shapes, by name in the model.
            others: known names of other tensors of the checkpoint.
        """
        matching = Matching()
        # What enters one conversion together: by its first parameter and its number.
        together: dict[tuple[str, int], dict[str, Input]] = {}
        # In the order in which transformers visits a checkpoint: some renamings depend on it.
        for name in sorted({*masks, *others}, key=natural_key):
            renamed, target, number, pattern = self._renamed(name, parameters)
            if name not in masks:
                continue
            if target not in parameters:
                matching.unexpected[name] = (
                    "" if target == name else f"transformers loads it as {target}"
                )
            elif number is None:
                matching.add(name, masks[name], target, parameters[target])
            else:
                source = Input(renamed, pattern, name, masks[name])
                together.setdefault((target, number), {})[renamed] = source
        stand_in = Shapes(parameters)
        for (target, number), sources in together.items():
            converter, inputs = self._converters[number], list(sources.values())
            conversion = Conversion(target, converter, inputs, self._config, stand_in)
            self._match_converted(conversion, parameters, matching)
        return matching

    def _renamed(
        self, name: str, parameters: Mapping[str, Shape]
    ) -> tuple[str, str, int | None, str | None]:
        """Rename a tensor of the checkpoint as transformers does.

        Returns:
            The name with which it enters a conversion; the name of the parameter, the first one
            if there are several; the number of the conversion, or None; and the pattern of the
            conversion that the name matched.
        """
        renamed = renamed_by(self._renamings, name)
        target, number, pattern = renamed, None, None
        for position, converter in enumerate(self._converters):
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                number = position
                break
        if target not in parameters:
            other = self.with_other_prefix(target, parameters)
            if other is not None:
                shorter = len(other) < len(target)
                start = f"{self._prefix}."
                renamed = renamed.removeprefix(start) if shorter else start + renamed
                target = other
        if target not in parameters:
            unchanged = name if name in parameters else self.with_other_prefix(name, parameters)
            if unchanged is not None:
                return unchanged, unchanged, None, None
        return renamed, target, number, pattern

    def _match_converted(
        self, conversion: Conversion, parameters: Mapping[str, Shape], matching: Matching
    ) -> None:
        """Plan the conversion of masks that together make one parameter or several."""
        names = [source.name for source in conversion.inputs if source.name is not None]
        computing = computing_step(conversion.converter)
        if computing is not None:
            reason = (
                f"transformers makes {conversion.target} of it by {computing}, "
                "which may do more than move elements"
            )
            matching.unexpected |= dict.fromkeys(names, reason)
            return
        conversion = replace(conversion, inputs=_all_inputs(conversion, parameters))
        try:
            outputs = conversion.shapes()
        except Exception as error:  # an operation raises for shapes that it does not support
            matching.mismatched |= dict.fromkeys(
                names, f"{conversion.target} cannot be made of it ({error})"
            )
            return
        wrong = {n: s for n, s in outputs.items() if parameters.get(n) != s}
        if wrong:
            target, shape = next(iter(wrong.items()))
            reason = f"{target} has shape {parameters.get(target)}; its masks give {shape}"
            matching.mismatched |= dict.fromkeys(names, reason)
            return
        taken = [target for target in outputs if target in matching.sources]
        if taken:
            first = ", ".join(matching.sources[taken[0]].names[:3])
            matching.unexpected |= dict.fromkeys(names, f"{taken[0]} has the mask {first}")
            return
        matching.sources |= {target: Converted(conversion, target) for target in outputs}


def _all_inputs(conversion: Conversion, parameters: Mapping[str, Shape]) -> list[Input]:
    """The inputs of a conversion, including tensors without a mask.

    They result from the reverse conversion of the parameters' shapes.
    """
    masked = {source.renamed: source for source in conversion.inputs}
    try:
        whole = _reversed(conversion, parameters)
    except Exception:  # without a reverse, every tensor needs a mask
        return conversion.inputs
    if any(whole.get(renamed) != source.shape for renamed, source in masked.items()):
        return conversion.inputs
    inputs = []
    for renamed in sorted(whole, key=natural_key):
        source = masked.get(renamed)
        if source is None:
            pattern = copy.deepcopy(conversion.converter).rename_source_key(renamed)[1]
            source = Input(renamed, pattern, None, whole[renamed])
        inputs.append(source)
    return inputs


def _reversed(conversion: Conversion, parameters: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of the tensors from which a conversion makes parameters, by name."""
    first, *rest = conversion.converter.target_patterns
    target = conversion.target
    targets = [target, *(target.replace(first, other, 1) for other in rest)]
    backwards = conversion.converter.reverse_transform()
    inputs = []
    for target in targets:
        renamed, pattern = backwards.rename_source_key(target)
        if pattern is None:
            raise LookupError(target)
        inputs.append(Input(target, pattern, target, parameters[target]))
    return replace(conversion, target=renamed, converter=backwards, inputs=inputs).shapes()


def match_masks(
    masks: Mapping[str, Shape],
    parameters: Mapping[str, Shape],
    rules: TransformersRules | None,
    *,
    is_checkpoint: bool,
    others: Iterable[str] = (),
) -> Matching:
    """Find the parameters of masks.

    [Note: whose names] A name in a checkpoint may be that of a parameter which is loaded from
    another tensor, or transposed on loading. So names of a checkpoint always go through the
    rules, and names of a model only if the model has no parameter of this name.

    Args:
        masks: shapes, by name in the file.
        parameters: shapes, by name in the model; a tied one under all its names.
        rules: of the model's library; None: names do not change.
        is_checkpoint: whether the names are those of a checkpoint, or of a model.
        others: known names of other tensors of the checkpoint.
    """
    matching = Matching()
    unmatched = dict(masks)
    if rules is None or not is_checkpoint:
        for name, shape in masks.items():
            parameter: str | None = name if name in parameters else None
            if parameter is None and rules is not None:
                parameter = rules.with_other_prefix(name, parameters)
            if parameter is not None:
                matching.add(name, shape, parameter, parameters[parameter])
                del unmatched[name]
    if rules is not None and unmatched:
        by_rules = rules.match(unmatched, parameters, others)
        matching.unexpected |= by_rules.unexpected
        for parameter, source in by_rules.sources.items():
            if parameter in matching.sources:
                reason = f"{parameter} has a mask of its own name"
                matching.unexpected |= dict.fromkeys(source.names, reason)
            else:
                matching.sources[parameter] = source
        matching.mismatched |= by_rules.mismatched
    else:
        matching.unexpected |= dict.fromkeys(unmatched, "")
    return matching
