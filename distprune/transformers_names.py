"""Names and tensors as transformers makes them of a checkpoint, by its own conversion table.

transformers 5 renames tensors when it loads a checkpoint, and merges, splits, transposes and
permutes some (the experts of a mixture become one tensor). A mask goes the same way: its name by
the same renamings, and its elements by the same operations, which run on booleans as long as
they move elements and compute nothing.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distprune.mask_matching import Matching, ReadMask, Shape
from distprune.naming import named_modules, unwrap
from distprune.natural_order import natural_key

_OPERATIONS_MODULE = "transformers.core_model_loading"
# Operations that move elements, and neither compute with them nor leave some out.
MOVING_OPERATIONS = frozenset({
    "Chunk", "Concatenate", "Conv3dToLinear", "ErnieFuseAndSplitTextVisionExperts",
    "ErnieSplitAndDecoupleTextVisionExperts", "Interleave", "LinearToConv3d", "MergeModulelist",
    "PermuteForRope", "Split", "SplitModulelist", "Transpose", "VisionFuseAndPermuteForRope",
    "VisionUnfuseAndPermuteForRope",
})  # fmt: skip


def rules_for(model: nn.Module) -> TransformersRules | None:
    """How transformers loads checkpoints into a model; None if it is not one of its models.

    Args:
        model: wrapped or not.
    """
    modeling = sys.modules.get("transformers.modeling_utils")  # or nobody has such a model
    model = unwrap(model)
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    return TransformersRules(model)


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
        for transform in _transforms(model):
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
        stand_in = _Shapes(parameters)
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
        stand_in: _Shapes,
        found: Matching,
    ) -> None:
        """Plan the conversion of masks that go into one parameter, or several, together."""
        names = [name for name, _ in group.members.values()]
        computing = [each for each in group.converter.operations if not _only_moves(each)]
        if computing:
            reason = (
                f"transformers makes {group.target} of it by {type(computing[0]).__name__}, "
                "which may do more than move elements"
            )
            found.unexpected |= dict.fromkeys(names, reason)
            return
        inputs = self._inputs(group, masks, parameters, stand_in)
        conversion = _Conversion(group.target, group.converter, inputs, self._config, stand_in)
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
        stand_in: _Shapes,
    ) -> list[_Input]:
        """What goes into a conversion: those tensors, too, that have no mask.

        The reverse of the conversion tells them, from the shapes of the parameters.
        """
        given = [
            _Input(renamed, pattern, name, masks[name])
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
            inputs.append(_Input(renamed, pattern, name, whole[renamed]))
        return inputs

    def _reversed(
        self, group: _Group, parameters: Mapping[str, Shape], stand_in: _Shapes
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
            inputs.append(_Input(target, pattern, target, parameters[target]))
        conversion = _Conversion(renamed, backwards, inputs, self._config, stand_in)
        return conversion.shapes()


@dataclass
class Converted:
    """A mask that a conversion makes of one or several; see mask_matching.MaskSource.

    Attributes:
        conversion: of them.
        target: the parameter, among those that it makes.
    """

    conversion: _Conversion
    target: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.conversion.inputs if each.name is not None)

    def read(self, read_mask: ReadMask) -> Tensor:
        def tensor_of(each: _Input) -> Tensor:
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


@dataclass(frozen=True)
class _Input:
    """One tensor that goes into a conversion.

    Attributes:
        renamed: its name before the conversion.
        pattern: of the converter, that the name matched.
        name: of its mask; None if it has none.
        shape: of the tensor.
    """

    renamed: str
    pattern: str | None
    name: str | None
    shape: Shape


@dataclass
class _Conversion:
    """A conversion of transformers with all that goes into it.

    Attributes:
        target: the name that transformers calls it by.
        converter: of transformers; is not changed.
        inputs: in the order in which transformers takes them.
        config: of the model.
        model: what stands for it.
    """

    target: str
    converter: Any
    inputs: list[_Input]
    config: Any
    model: Any

    def run(self, tensor_of: Any) -> dict[str, Tensor]:
        """Tensors by the names of the parameters."""
        converter = copy.deepcopy(self.converter)
        for each in self.inputs:
            converter.add_tensor(self.target, each.renamed, each.pattern, tensor_of(each))
        made = converter.convert(self.target, model=self.model, config=self.config)
        return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}

    def shapes(self) -> dict[str, Shape]:
        """Of what :meth:`run` makes; nothing is computed."""
        made = self.run(lambda each: torch.empty(each.shape, dtype=torch.bool, device="meta"))
        return {name: tuple(value.shape) for name, value in made.items()}


class _Shapes:
    """What operations ask of a model: the shapes of its parameters, by their plain names."""

    def __init__(self, parameters: Mapping[str, Shape]) -> None:
        self._parameters = parameters

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._parameters[name], dtype=torch.bool, device="meta")


class _Tree:
    """What transformers' table asks of a model: its models by their plain names and own classes.

    Wrappers change both.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.base_model_prefix = model.base_model_prefix

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        base = sys.modules["transformers.modeling_utils"].PreTrainedModel
        for name, module in named_modules(self._model):
            if isinstance(module, base):
                cls = _own_class(module, base)
                bare = cls.__new__(cls)
                object.__setattr__(bare, "config", module.config)
                yield name, bare


def _own_class(module: nn.Module, base: type) -> type:
    """The class of a model before FSDP2 put another one in its place."""
    sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return next(
        cls
        for cls in type(module).__mro__
        if issubclass(cls, base) and not issubclass(cls, sharded)
    )


def _transforms(model: Any) -> list[Any]:
    """What transformers does on loading, in order; nothing before transformers 5."""
    try:
        table = importlib.import_module("transformers.conversion_mapping")
        listed = table.get_model_conversion_mapping(_Tree(model))
    except (ImportError, AttributeError):
        return []
    # Those that a user gave to from_pretrained (key_mapping) go first, as they did there.
    used = getattr(model, "_weight_conversions", None) or []
    known = {_patterns(each) for each in listed}
    own = [_fresh(each) for each in used if _patterns(each) not in known]
    return [*own, *listed]


def _patterns(transform: Any) -> tuple[Any, ...]:
    return (
        type(transform).__name__,
        tuple(transform.source_patterns),
        tuple(transform.target_patterns),
        transform.scope_prefix,
    )


def _fresh(transform: Any) -> Any:
    """A copy, so that the model's own is not told of names that it has not met."""
    return copy.deepcopy(transform)


def _only_moves(operation: Any) -> bool:
    cls = type(operation)
    return cls.__module__ == _OPERATIONS_MODULE and cls.__name__ in MOVING_OPERATIONS
