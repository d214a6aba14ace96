"""What transformers makes of a checkpoint on loading, and back; and masks that go the same way.

transformers 5 renames tensors when it loads a checkpoint, and merges, splits, transposes and
permutes some (the experts of a mixture become one tensor); when it saves, it does the reverse. A
mask has the name of a tensor of a checkpoint, or of a parameter of the model from which it was
saved. :func:`match_masks` finds the parameter by this name alone, or as transformers would load it:
the name goes through the same renamings as its tensor's, and the elements through the same
operations, which work on booleans as long as they only move elements. :func:`as_saved` goes back.
"""

from __future__ import annotations

import collections
import copy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.naming import named_modules, unwrap
from distprune.base.selecting import natural_key

Shape = tuple[int, ...]
# From a name in the file to the whole mask, bool, of its shape in the file.
ReadMask = Callable[[str], Tensor]

_OPERATIONS_MODULE = "transformers.core_model_loading"
# Operations that only move elements: they neither compute with them nor drop any.
MOVING_OPERATIONS = frozenset({
    "Chunk", "Concatenate", "Conv3dToLinear", "ErnieFuseAndSplitTextVisionExperts",
    "ErnieSplitAndDecoupleTextVisionExperts", "Interleave", "LinearToConv3d", "MergeModulelist",
    "PermuteForRope", "Split", "SplitModulelist", "Transpose", "VisionFuseAndPermuteForRope",
    "VisionUnfuseAndPermuteForRope",
})  # fmt: skip


@dataclass(frozen=True)
class Input:
    """One input tensor of a conversion.

    Attributes:
        renamed: its name before the conversion.
        pattern: the converter's pattern that the name matched.
        name: of its mask; None if it has none.
        shape: of the tensor.
    """

    renamed: str
    pattern: str | None
    name: str | None
    shape: Shape


@dataclass
class Conversion:
    """A conversion of transformers with its inputs.

    Attributes:
        target: the name by which transformers calls it.
        converter: of transformers; not changed.
        inputs: in the order in which transformers passes them.
        config: of the model.
        model: a stand-in for the model.
    """

    target: str
    converter: Any
    inputs: list[Input]
    config: Any
    model: Any

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the masks among its inputs."""
        return tuple(source.name for source in self.inputs if source.name is not None)

    @property
    def is_stack(self) -> bool:
        """Whether row i of the result is made of input i of each pattern, as merged experts are."""
        stacking, *rest = self.converter.operations
        counts = collections.Counter(source.pattern for source in self.inputs)
        return (
            type(stacking).__name__ == "MergeModulelist"
            and stacking.dim == 0
            and len(set(counts.values())) == 1
            and all(map(_keeps_rows, rest))
        )

    def run(
        self, tensor_of: Callable[[Input], Tensor], rows: range | None = None
    ) -> dict[str, Tensor]:
        """The converted tensors, by name of the parameter.

        Args:
            tensor_of: an input.
            rows: those of the results; only if :attr:`is_stack`. None: all.
        """
        converter = copy.deepcopy(self.converter)
        seen: collections.Counter[str | None] = collections.Counter()
        for source in self.inputs:
            seen[source.pattern] += 1
            if rows is not None and seen[source.pattern] - 1 not in rows:
                continue
            converter.add_tensor(self.target, source.renamed, source.pattern, tensor_of(source))
        tensors = converter.convert(self.target, model=self.model, config=self.config)
        if isinstance(tensors, tuple):  # the first versions of transformers 5 return errors, too
            tensors = tensors[0]
        return {n: value[0] if isinstance(value, list) else value for n, value in tensors.items()}

    def masks(self, read: ReadMask, rows: range | None = None) -> dict[str, Tensor]:
        """The converted masks: see :meth:`run`; of an input without a mask, all elements are kept.

        Args:
            read: from the name of a mask to the mask.
            rows: as for :meth:`run`.
        """

        def tensor_of(source: Input) -> Tensor:
            if source.name is None:
                return torch.ones(source.shape, dtype=torch.bool)
            return read(source.name)

        return self.run(tensor_of, rows)

    def shapes(self) -> dict[str, Shape]:
        """The shapes of the tensors that :meth:`run` returns, without computing them."""
        tensors = self.run(
            lambda source: torch.empty(source.shape, dtype=torch.bool, device="meta")
        )
        return {name: tuple(value.shape) for name, value in tensors.items()}


def _keeps_rows(operation: Any) -> bool:
    """Whether an operation treats each index of dimension 0 by itself."""
    match type(operation).__name__:
        case "Concatenate":
            return bool(operation.dim > 0)
        case "Transpose":  # check_dims compares with the shape of the whole parameter
            return min(operation.dim0, operation.dim1) > 0 and not operation.check_dims
    return False


class Shapes:
    """A stand-in for a model in operations, which need the shapes of its parameters only."""

    def __init__(self, parameters: Mapping[str, Shape]) -> None:
        self._parameters = parameters

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._parameters[name], dtype=torch.bool, device="meta")


def _stand_in(model: Any) -> Any:
    """A stand-in for a model in transformers' table: its submodels by plain name and own class.

    Wrappers change both: an object has the class that its model had before FSDP2, and its config.
    """
    base = sys.modules["transformers.modeling_utils"].PreTrainedModel
    sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())

    def bare(model: Any) -> Any:
        classes = type(model).__mro__
        own = next(c for c in classes if issubclass(c, base) and not issubclass(c, sharded))
        made: Any = object.__new__(own)
        object.__setattr__(made, "config", model.config)
        return made

    def submodels() -> Iterator[tuple[str, Any]]:
        for name, module in named_modules(model):
            if isinstance(module, base):
                yield name, bare(module)

    root = bare(model)
    object.__setattr__(root, "named_modules", submodels)
    return root


def pretrained_model(model: nn.Module) -> Any | None:
    """A transformers model without its wrapper; None if it is not a transformers model."""
    # If it was not imported, no transformers model exists.
    modeling = sys.modules.get("transformers.modeling_utils")
    model = unwrap(model)
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    return model


def _transforms_of(model: Any, *, add_legacy: bool = True) -> list[Any]:
    """The transforms of transformers on loading, in order.

    Args:
        model: a transformers model, unwrapped.
        add_legacy: include the renamings of old checkpoints of any model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms: list[Any] = get_model_conversion_mapping(_stand_in(model), add_legacy=add_legacy)
    # The user's own transforms (key_mapping of from_pretrained) come first, as on loading.
    applied = getattr(model, "_weight_conversions", None) or []
    in_table = {_patterns(step) for step in transforms}
    own = [copy.deepcopy(step) for step in applied if _patterns(step) not in in_table]
    return [*own, *transforms]


def _patterns(transform: Any) -> tuple[Any, ...]:
    return (
        type(transform).__name__,
        tuple(transform.source_patterns),
        tuple(transform.target_patterns),
        getattr(transform, "scope_prefix", None),
    )


def _computing_step(converter: Any) -> str | None:
    """The operation of a conversion that may do more than move elements; None without one."""
    for operation in converter.operations:
        cls = type(operation)
        if cls.__module__ != _OPERATIONS_MODULE or cls.__name__ not in MOVING_OPERATIONS:
            return cls.__name__
    return None


def _renamings_and_converters(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    """The transforms that only rename, and those that convert tensors, each in order."""
    converters = [step for step in transforms if hasattr(step, "operations")]
    return [step for step in transforms if not hasattr(step, "operations")], converters


def _renamed_by(renamings: list[Any], name: str) -> str:
    """A name after all renamings."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


@dataclass(frozen=True)
class MaskSource:
    """The origin of one parameter's mask.

    Attributes:
        names: of masks in the file.
        conversion: makes the mask of them; None: there is one, which applies unchanged.
        target: name of the parameter among those that the conversion makes.
    """

    names: tuple[str, ...]
    conversion: Conversion | None = None
    target: str = ""

    def read(self, read_mask: ReadMask, rows: range | None = None) -> Tensor:
        """The whole, or some rows of it if the conversion is a stack."""
        if self.conversion is None:
            return read_mask(self.names[0])
        return self.conversion.masks(read_mask, rows)[self.target]


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
            self.sources[parameter] = MaskSource((name,))


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
        self._transforms = _transforms_of(model)
        self._renamings, self._converters = _renamings_and_converters(self._transforms)

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
        self,
        masks: Mapping[str, Shape],
        parameters: Mapping[str, Shape],
        others: Mapping[str, Shape],
    ) -> Matching:
        """Find the parameters of masks that have the names of a checkpoint.

        Args:
            masks: shapes, by name in the checkpoint.
            parameters: shapes, by name in the model.
            others: shapes of other tensors of the checkpoint, by name. What enters a conversion
                together with masks, and has none, is kept.
        """
        matching = Matching()
        # What enters one conversion together: by its first parameter and its number.
        together: dict[tuple[str, int], dict[str, Input]] = {}
        # In the order in which transformers visits a checkpoint: some renamings depend on it.
        for name, shape in sorted(
            {**others, **masks}.items(), key=lambda item: natural_key(item[0])
        ):
            renamed, target, number, pattern = self._renamed(name, parameters)
            if number is not None and target in parameters:
                source = Input(renamed, pattern, name if name in masks else None, shape)
                together.setdefault((target, number), {})[renamed] = source
            elif name in masks and target in parameters:
                matching.add(name, shape, target, parameters[target])
            elif name in masks:
                reason = "" if target == name else f"transformers loads it as {target}"
                matching.unexpected[name] = reason
        stand_in = Shapes(parameters)
        for (target, number), sources in together.items():
            converter, inputs = self._converters[number], list(sources.values())
            conversion = Conversion(target, converter, inputs, self._config, stand_in)
            if conversion.names:
                _match_converted(conversion, parameters, matching)
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
        renamed = _renamed_by(self._renamings, name)
        target, number, pattern = _converted_name(self._converters, renamed)
        if target not in parameters:
            other = self.with_other_prefix(target, parameters)
            if other is not None:
                start = f"{self._prefix}."
                is_shorter = len(other) < len(target)
                renamed = renamed.removeprefix(start) if is_shorter else start + renamed
                return renamed, other, number, pattern
            unchanged = name if name in parameters else self.with_other_prefix(name, parameters)
            if unchanged is not None:
                return unchanged, unchanged, None, None
        return renamed, target, number, pattern


def _converted_name(converters: list[Any], name: str) -> tuple[str, int | None, str | None]:
    """The name that the first conversion of a tensor gives it, its number, and its pattern."""
    for number, converter in enumerate(converters):
        target, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return target, number, pattern
    return name, None, None


def _match_converted(
    conversion: Conversion, parameters: Mapping[str, Shape], matching: Matching
) -> None:
    """Plan the conversion of masks that together make one parameter or several."""
    names, computing = conversion.names, _computing_step(conversion.converter)
    if computing is not None:
        reason = (
            f"transformers makes {conversion.target} of it by {computing}, "
            "which may do more than move elements"
        )
        matching.unexpected |= dict.fromkeys(names, reason)
        return
    try:
        outputs = conversion.shapes()
    except Exception as error:  # an operation raises for shapes that it does not support
        reason = f"{conversion.target} cannot be made of it ({error})"
        matching.mismatched |= dict.fromkeys(names, reason)
        return
    for target, shape in outputs.items():
        if parameters.get(target) != shape:
            reason = f"{target} has shape {parameters.get(target)}; its masks give {shape}"
            matching.mismatched |= dict.fromkeys(names, reason)
            return
        if target in matching.sources:
            first = ", ".join(matching.sources[target].names[:3])
            matching.unexpected |= dict.fromkeys(names, f"{target} has the mask {first}")
            return
    for target in outputs:
        matching.sources[target] = MaskSource(names, conversion, target)


def match_masks(
    masks: Mapping[str, Shape],
    parameters: Mapping[str, Shape],
    rules: TransformersRules | None,
    *,
    is_checkpoint: bool,
    others: Mapping[str, Shape] | None = None,
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
        others: shapes of other tensors of the checkpoint, as far as they are known.
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
        by_rules = rules.match(unmatched, parameters, others or {})
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
        if self.conversion is None:
            return dict(zip(self.tensors, masks.values(), strict=True))
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
        return [unchanged(name, name, parameters) for name in masked]
    renamings, converters = _backwards(pretrained)
    saved: list[SavedMasks] = []
    groups: dict[tuple[str, int], list[Input]] = {}
    # In the order in which transformers visits a state dict: some renamings depend on it.
    for name in sorted(parameters, key=natural_key):
        target, number, pattern = _converted_name(converters, name)
        if number is not None:
            mask = name if name in masked else None
            member = Input(name, pattern, mask, parameters[name])
            groups.setdefault((target, number), []).append(member)
        elif name in masked:
            saved.append(unchanged(name, _renamed_by(renamings, name), parameters))
    stand_in = Shapes(parameters)
    for (target, position), inputs in groups.items():
        conversion = Conversion(target, converters[position], inputs, pretrained.config, stand_in)
        if conversion.names:
            saved.append(_converted(conversion, renamings))
    return saved


def unchanged(name: str, saved_name: str, parameters: Mapping[str, Shape]) -> SavedMasks:
    """The mask of a parameter that is saved as it is, under another name or its own."""
    return SavedMasks((name,), {saved_name: parameters[name]}, None, {})


def _converted(conversion: Conversion, renamings: list[Any]) -> SavedMasks:
    names, computing = conversion.names, _computing_step(conversion.converter)
    if computing is not None:
        raise NotImplementedError(
            f"{names[0]}: transformers saves it by {computing}, which may do more than move "
            "elements; expected names='model', which leaves masks as they are."
        )
    shapes = conversion.shapes()
    renamed = {name: _renamed_by(renamings, name) for name in shapes}
    tensors = {renamed[name]: shape for name, shape in shapes.items()}
    return SavedMasks(names, tensors, conversion, renamed)


def _backwards(model: Any) -> tuple[list[Any], list[Any]]:
    """The renamings and the conversions of saving, in order."""
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # the model was not loaded; then transformers adds no prefix on saving
        table = _transforms_of(model, add_legacy=False)
        transforms = [step for step in table if type(step).__name__ != "PrefixChange"]
    try:
        reverse = [copy.deepcopy(step).reverse_transform() for step in reversed(transforms)]
    except NotImplementedError as error:
        raise NotImplementedError(
            "a conversion of this model has no reverse, so transformers does not save it as it "
            "was; expected names='model', which leaves masks as they are."
        ) from error
    return _renamings_and_converters(reverse)
