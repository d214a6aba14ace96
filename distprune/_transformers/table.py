"""The conversion table that transformers has for a model, and masks as it would save them.

transformers 5 renames tensors when it loads a checkpoint, and merges, splits, transposes and
permutes some (the experts of a mixture become one tensor); when it saves, it does the reverse: one
tensor of the model becomes several in the files, or the other way round. Masks are converted in the
same way, by the same operations.
"""

from __future__ import annotations

import collections
import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base.naming import named_modules, unwrap
from distprune.base.selecting import natural_key

Shape = tuple[int, ...]

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

    def masks(self, read: Callable[[str], Tensor], rows: range | None = None) -> dict[str, Tensor]:
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

    Wrappers change both.
    """

    def submodels() -> Iterator[tuple[str, Any]]:
        base = sys.modules["transformers.modeling_utils"].PreTrainedModel
        for name, module in named_modules(model):
            if isinstance(module, base):
                yield name, _bare(module)

    root = _bare(model)
    object.__setattr__(root, "named_modules", submodels)
    return root


def _bare(model: Any) -> Any:
    """An object of the class that a model had before FSDP2, with its configuration only."""
    base = sys.modules["transformers.modeling_utils"].PreTrainedModel
    sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    bare: Any = object.__new__(
        next(
            cls
            for cls in type(model).__mro__
            if issubclass(cls, base) and not issubclass(cls, sharded)
        )
    )
    object.__setattr__(bare, "config", model.config)
    return bare


def pretrained_model(model: nn.Module) -> Any | None:
    """A transformers model without its wrapper; None if it is not a transformers model."""
    # If it was not imported, no transformers model exists.
    modeling = sys.modules.get("transformers.modeling_utils")
    model = unwrap(model)
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    return model


def transforms_of(model: Any, *, add_legacy: bool = True) -> list[Any]:
    """The transforms of transformers on loading, in order; none before transformers 5.

    Args:
        model: a transformers model, unwrapped.
        add_legacy: include the renamings of old checkpoints of any model.
    """
    try:
        table = importlib.import_module("transformers.conversion_mapping")
    except ImportError:  # transformers 4 renames nothing by a table
        return []
    try:
        transforms = table.get_model_conversion_mapping(_stand_in(model), add_legacy=add_legacy)
    except (AttributeError, TypeError) as error:
        version = sys.modules["transformers"].__version__
        warnings.warn(
            f"the conversion table of transformers {version} cannot be read ({error}), so masks "
            "are matched by names alone; expected a version from 5.0 to 5.24.",
            stacklevel=2,
        )
        return []
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


def computing_step(converter: Any) -> str | None:
    """The operation of a conversion that may do more than move elements; None without one."""
    for operation in converter.operations:
        cls = type(operation)
        if cls.__module__ != _OPERATIONS_MODULE or cls.__name__ not in MOVING_OPERATIONS:
            return cls.__name__
    return None


def renamings_and_converters(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    """The transforms that only rename, and those that convert tensors, each in order."""
    converters = [step for step in transforms if hasattr(step, "operations")]
    return [step for step in transforms if not hasattr(step, "operations")], converters


def renamed_by(renamings: list[Any], name: str) -> str:
    """A name after all renamings."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


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
