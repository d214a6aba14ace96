"""Masks of a checkpoint as transformers would load them, were they its tensors.

A mask goes the way of its tensor: its name by the same renamings, and its elements by the same
operations, which run on booleans as long as they move elements and compute nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.natural_order import natural_key
from distprune._transformers.mask_matching import Matching, ReadMask, Shape
from distprune._transformers.table import (
    Conversion,
    Input,
    Shapes,
    only_moves,
    pretrained_model,
    transforms_of,
)


def rules_for(model: nn.Module) -> TransformersRules | None:
    """How transformers loads checkpoints into a model; None if it is not one of its models.

    Args:
        model: wrapped or not.
    """
    pretrained = pretrained_model(model)
    return None if pretrained is None else TransformersRules(pretrained)


class TransformersRules:
    """See mask_matching.LoadingRules.

    Args:
        model: of transformers, unwrapped; modules below it may be wrapped.
    """

    def __init__(self, model: Any) -> None:
        self._config = model.config
        self._prefix: str = model.base_model_prefix
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        for transform in transforms_of(model):
            is_converter = hasattr(transform, "operations")
            (self._converters if is_converter else self._renamings).append(transform)

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
        """Find the parameters of masks; see mask_matching.LoadingRules."""
        found = Matching()
        groups: dict[tuple[str, int], _Group] = {}
        # In the order in which transformers goes over a checkpoint: some renamings depend on it.
        for name in sorted({*masks, *others}, key=natural_key):
            renamed, target, which, pattern = self._renamed(name, parameters)
            if name not in masks:
                continue
            if target not in parameters:
                found.unexpected[name] = (
                    "" if target == name else f"transformers loads it as {target}"
                )
            elif which is None:
                found.add(name, masks[name], target, parameters[target])
            else:
                group = groups.setdefault((target, which), _Group(target, self._converters[which]))
                group.members[renamed] = (name, pattern)
        stand_in = Shapes(parameters)
        for group in groups.values():
            self._match_group(group, masks, parameters, stand_in, found)
        return found

    def _renamed(
        self, name: str, parameters: Mapping[str, Shape]
    ) -> tuple[str, str, int | None, str | None]:
        """What transformers makes of a name.

        Returns:
            The name that goes into a conversion; the parameter's name, the first one if there are
            several; which conversion, or None; and the pattern of it that the name matched.
        """
        renamed = name
        for renaming in self._renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        target, which, pattern = renamed, None, None
        for position, converter in enumerate(self._converters):
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                which = position
                break
        if target not in parameters:
            other = self.with_other_prefix(target, parameters)
            if other is not None:
                shorter = len(other) < len(target)
                start = f"{self._prefix}."
                renamed = renamed.removeprefix(start) if shorter else start + renamed
                target = other
        if target not in parameters:
            as_it_is = name if name in parameters else self.with_other_prefix(name, parameters)
            if as_it_is is not None:
                return as_it_is, as_it_is, None, None
        return renamed, target, which, pattern

    def _match_group(
        self,
        group: _Group,
        masks: Mapping[str, Shape],
        parameters: Mapping[str, Shape],
        stand_in: Shapes,
        found: Matching,
    ) -> None:
        """Plan the conversion of masks that go into one parameter, or several, together."""
        names = [name for name, _ in group.members.values()]
        computing = [each for each in group.converter.operations if not only_moves(each)]
        if computing:
            reason = (
                f"transformers makes {group.target} of it by {type(computing[0]).__name__}, "
                "which may do more than move elements"
            )
            found.unexpected |= dict.fromkeys(names, reason)
            return
        inputs = self._inputs(group, masks, parameters, stand_in)
        conversion = Conversion(group.target, group.converter, inputs, self._config, stand_in)
        try:
            outputs = conversion.shapes()
        except Exception as error:  # of an operation on shapes that it is not for
            found.mismatched |= dict.fromkeys(
                names, f"{group.target} cannot be made of it ({error})"
            )
            return
        wrong = {n: s for n, s in outputs.items() if parameters.get(n) != s}
        if wrong:
            target, shape = next(iter(wrong.items()))
            reason = f"{target} has shape {parameters.get(target)}; its masks give {shape}"
            found.mismatched |= dict.fromkeys(names, reason)
            return
        taken = [target for target in outputs if target in found.sources]
        if taken:
            first = ", ".join(found.sources[taken[0]].names[:3])
            found.unexpected |= dict.fromkeys(names, f"{taken[0]} has the mask {first}")
            return
        found.sources |= {target: Converted(conversion, target) for target in outputs}

    def _inputs(
        self,
        group: _Group,
        masks: Mapping[str, Shape],
        parameters: Mapping[str, Shape],
        stand_in: Shapes,
    ) -> list[Input]:
        """What goes into a conversion: those tensors, too, that have no mask.

        The reverse of the conversion tells them, from the shapes of the parameters.
        """
        given = [
            Input(renamed, pattern, name, masks[name])
            for renamed, (name, pattern) in group.members.items()
        ]
        try:
            whole = self._reversed(group, parameters, stand_in)
        except Exception:  # it has no reverse, and then every tensor needs a mask
            return given
        if any(whole.get(each.renamed) != each.shape for each in given):
            return given
        pattern_of = {renamed: pattern for renamed, (_, pattern) in group.members.items()}
        inputs = []
        for renamed in sorted(whole, key=natural_key):
            if renamed in group.members:
                name: str | None = group.members[renamed][0]
                pattern = pattern_of[renamed]
            else:
                name, pattern = None, copy.deepcopy(group.converter).rename_source_key(renamed)[1]
            inputs.append(Input(renamed, pattern, name, whole[renamed]))
        return inputs

    def _reversed(
        self, group: _Group, parameters: Mapping[str, Shape], stand_in: Shapes
    ) -> dict[str, Shape]:
        """The tensors that a conversion makes parameters of: shapes, by name."""
        first, *rest = group.converter.target_patterns
        targets = [group.target, *(group.target.replace(first, other, 1) for other in rest)]
        backwards = group.converter.reverse_transform()
        inputs = []
        for target in targets:
            renamed, pattern = backwards.rename_source_key(target)
            if pattern is None:
                raise LookupError(target)
            inputs.append(Input(target, pattern, target, parameters[target]))
        conversion = Conversion(renamed, backwards, inputs, self._config, stand_in)
        return conversion.shapes()


@dataclass
class Converted:
    """A mask that a conversion makes of one or several; see mask_matching.MaskSource.

    Attributes:
        conversion: of them.
        target: the parameter, among those that it makes.
    """

    conversion: Conversion
    target: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.conversion.inputs if each.name is not None)

    def read(self, read_mask: ReadMask) -> Tensor:
        def tensor_of(each: Input) -> Tensor:
            if each.name is None:  # nothing of this tensor was pruned
                return torch.ones(each.shape, dtype=torch.bool)
            return read_mask(each.name)

        return self.conversion.run(tensor_of)[self.target]


class _Group:
    """Masks that one conversion takes together.

    Attributes:
        target: the first parameter that it makes.
        converter: of transformers.
        members: by name before the conversion, the name of the mask, and the pattern it matched.
    """

    def __init__(self, target: str, converter: Any) -> None:
        self.target = target
        self.converter = converter
        self.members: dict[str, tuple[str, str | None]] = {}
