"""What transformers makes of a checkpoint on loading, and back; models without their weights.

transformers 5 renames tensors when it loads a checkpoint, and merges, splits, transposes and
permutes some (the experts of a mixture become one tensor); when it saves, it does the reverse. A
mask has the name of a tensor of a checkpoint, or of a parameter of the model from which it was
saved. :func:`match_masks` finds the parameter by this name alone, or as transformers would load it:
the name goes through the same renamings as its tensor's, and the elements through the same
operations, which work on booleans as long as they only move elements. :func:`as_saved` goes back.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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


# One input tensor of a conversion: its name before the conversion; the converter's pattern that
# this matched; the name of its mask, None if it has none; and its shape.
Input = tuple[str, str | None, str | None, Shape]


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
        return tuple(name for _, _, name, _ in self.inputs if name is not None)

    @property
    def computing_step(self) -> str | None:
        """An operation that may do more than move elements; None without one."""
        for operation in map(type, self.converter.operations):
            is_known = operation.__module__ == _OPERATIONS_MODULE
            if not is_known or operation.__name__ not in MOVING_OPERATIONS:
                return operation.__name__
        return None

    @property
    def is_stack(self) -> bool:
        """Whether row i of the result is made of input i of each pattern, as merged experts are."""
        stacking, *rest = self.converter.operations
        counts = collections.Counter(pattern for _, pattern, _, _ in self.inputs)
        return (
            type(stacking).__name__ == "MergeModulelist"
            and stacking.dim == 0
            and len(set(counts.values())) == 1
            and all(map(_keeps_rows, rest))
        )

    def run(
        self, tensor_of: Callable[[str | None, Shape], Tensor], rows: range | None = None
    ) -> dict[str, Tensor]:
        """The converted tensors, by name of the parameter.

        Args:
            tensor_of: from the name of the mask of an input, and its shape, to the input.
            rows: those of the results; only if :attr:`is_stack`. None: all.
        """
        converter = copy.deepcopy(self.converter)
        seen: collections.Counter[str | None] = collections.Counter()
        for renamed, pattern, name, shape in self.inputs:
            seen[pattern] += 1
            if rows is None or seen[pattern] - 1 in rows:
                converter.add_tensor(self.target, renamed, pattern, tensor_of(name, shape))
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

        return self.run(
            lambda name, shape: torch.ones(shape, dtype=torch.bool) if name is None else read(name),
            rows,
        )

    def shapes(self) -> dict[str, Shape]:
        """The shapes of the tensors that :meth:`run` returns, without computing them."""
        tensors = self.run(lambda _, shape: _empty(shape))
        return {name: tuple(value.shape) for name, value in tensors.items()}


def _empty(shape: Shape) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device="meta")


def _keeps_rows(operation: Any) -> bool:
    """Whether an operation treats each index of dimension 0 by itself."""
    match type(operation).__name__:
        case "Concatenate":
            return bool(operation.dim > 0)
        case "Transpose":  # check_dims compares with the shape of the whole parameter
            return min(operation.dim0, operation.dim1) > 0 and not operation.check_dims
    return False


class _Transforms:
    """The transforms of one direction: first all renamings, then at most one conversion.

    Args:
        transforms: of transformers, in order.
        config: of the model.
        parameters: shapes of the model's parameters, by name, which some operations ask for.
    """

    def __init__(
        self, transforms: Iterable[Any], config: Any, parameters: Mapping[str, Shape]
    ) -> None:
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        for step in transforms:
            (self._converters if hasattr(step, "operations") else self._renamings).append(step)
        self._config, self._parameters = config, parameters
        # What enters one conversion together, by its first result and its converter.
        self._together: dict[tuple[str, int], dict[str, Input]] = {}

    def get_parameter(self, name: str) -> Tensor:
        """For operations, to which this object is the model."""
        return _empty(self._parameters[name])

    def rename(self, name: str) -> str:
        """A name after all renamings."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def target_of(self, name: str) -> tuple[str, int | None, str | None]:
        """What the conversion of a renamed tensor is called, its number, and the pattern."""
        for number, converter in enumerate(self._converters):
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return target, number, pattern
        return name, None, None

    def add(self, target: str, number: int, source: Input) -> None:
        """Let a tensor enter the conversion of this name and number."""
        self._together.setdefault((target, number), {})[source[0]] = source

    def conversions(self) -> Iterator[Conversion]:
        """All conversions that a mask enters."""
        for (target, number), inputs in self._together.items():
            converter = self._converters[number]
            made = Conversion(target, converter, [*inputs.values()], self._config, self)
            if made.names:
                yield made


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

    root = bare(model)
    submodels = [(name, bare(m)) for name, m in named_modules(model) if isinstance(m, base)]
    object.__setattr__(root, "named_modules", lambda: iter(submodels))
    return root


def pretrained_model(model: nn.Module) -> Any | None:
    """A transformers model without its wrapper; None if it is not a transformers model."""
    # If it was not imported, no transformers model exists.
    modeling = sys.modules.get("transformers.modeling_utils")
    model = unwrap(model)
    return model if modeling is not None and isinstance(model, modeling.PreTrainedModel) else None


def _transforms_of(model: Any, *, add_legacy: bool = True) -> list[Any]:
    """The transforms of transformers on loading, in order.

    Args:
        model: a transformers model, unwrapped.
        add_legacy: include the renamings of old checkpoints of any model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    def patterns(step: Any) -> tuple[Any, ...]:
        sides = tuple(step.source_patterns), tuple(step.target_patterns)
        return type(step).__name__, *sides, getattr(step, "scope_prefix", None)

    transforms: list[Any] = get_model_conversion_mapping(_stand_in(model), add_legacy=add_legacy)
    # The user's own transforms (key_mapping of from_pretrained) come first, as on loading.
    in_table = set(map(patterns, transforms))
    applied = getattr(model, "_weight_conversions", None) or []
    return [*(copy.deepcopy(s) for s in applied if patterns(s) not in in_table), *transforms]


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
        used: the transforms of transformers that have changed a name, as it records them: their
            reverse is what ``save_pretrained`` applies.
    """

    sources: dict[str, MaskSource] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)
    used: list[Any] = field(default_factory=list)

    def add(self, name: str, shape: Shape, parameter: str, expected: Shape) -> None:
        """Assign a mask to a parameter, unchanged; if there are several, the first one counts."""
        if parameter in self.sources:
            self.unexpected[name] = self._has_one(parameter)
        elif shape != expected:
            mask = "its mask" if name == parameter else f"its mask {name}"
            self.mismatched[name] = f"{parameter} has shape {expected}; {mask} has {shape}"
        else:
            self.sources[parameter] = MaskSource((name,))

    def add_converted(self, conversion: Conversion, parameters: Mapping[str, Shape]) -> None:
        """Assign masks that together make one parameter or several; all of these, or none."""
        names = conversion.names
        if (step := conversion.computing_step) is not None:
            reason = f"transformers makes {conversion.target} of it by {step}"
            reason += ", which may do more than move elements"
            self.unexpected |= dict.fromkeys(names, reason)
            return
        try:
            outputs = conversion.shapes()
        except Exception as error:  # an operation raises for shapes that it does not support
            reason = f"{conversion.target} cannot be made of it ({error})"
            self.mismatched |= dict.fromkeys(names, reason)
            return
        for target, shape in outputs.items():
            if parameters.get(target) != shape:
                reason = f"{target} has shape {parameters.get(target)}; its masks give {shape}"
                self.mismatched |= dict.fromkeys(names, reason)
                return
            if target in self.sources:
                self.unexpected |= dict.fromkeys(names, self._has_one(target))
                return
        for target in outputs:
            self.sources[target] = MaskSource(names, conversion, target)

    def _has_one(self, parameter: str) -> str:
        return f"{parameter} has the mask {', '.join(self.sources[parameter].names[:3])}"


def match_masks(
    masks: Mapping[str, Shape],
    parameters: Mapping[str, Shape],
    model: nn.Module,
    *,
    is_checkpoint: bool,
    others: Mapping[str, Shape] | None = None,
) -> Matching:
    """Find the parameters of masks.

    [Note: whose names] A name in a checkpoint may be that of a parameter which is loaded from
    another tensor, or transposed on loading. So names of a checkpoint always go through the
    transforms of transformers, and names of a model only if the model has no parameter of this
    name. In a model that is none of transformers, names are those of parameters.

    Args:
        masks: shapes, by name in the file.
        parameters: shapes, by name in the model; a tied one under all its names.
        model: wrapped or not.
        is_checkpoint: whether the names are those of a checkpoint, or of a model.
        others: shapes of other tensors of the checkpoint, as far as they are known. What enters a
            conversion together with masks, and has none, is kept.
    """
    matching, pretrained = Matching(), pretrained_model(model)
    if pretrained is None:
        for name, shape in masks.items():
            if name in parameters:
                matching.add(name, shape, name, parameters[name])
            else:
                matching.unexpected[name] = ""
        return matching
    steps, prefix = _transforms_of(pretrained), f"{pretrained.base_model_prefix}."
    transforms = _Transforms(steps, pretrained.config, parameters)
    shapes = {**(others or {}), **masks}
    if not is_checkpoint:
        for name in masks:
            own = _named(name, prefix, parameters)
            if own is not None:
                matching.add(name, shapes.pop(name), own, parameters[own])
    # In the order in which transformers visits a checkpoint: some renamings depend on it.
    for name in sorted(shapes, key=natural_key):
        renamed = transforms.rename(name)
        target, number, pattern = transforms.target_of(renamed)
        found = _named(target, prefix, parameters)
        if found is None:
            found, number = _named(name, prefix, parameters), None
        elif len(found) < len(target):
            renamed = renamed.removeprefix(prefix)
        elif len(found) > len(target):
            renamed = prefix + renamed
        if number is not None and found is not None:
            mask = name if name in masks else None
            transforms.add(found, number, (renamed, pattern, mask, shapes[name]))
        elif name in masks and found is not None:
            matching.add(name, shapes[name], found, parameters[found])
        elif name in masks:
            reason = "" if target == name else f"transformers loads it as {target}"
            matching.unexpected[name] = reason
    for conversion in transforms.conversions():
        matching.add_converted(conversion, parameters)
    matching.used = [step for step in steps if step.was_used()]
    return matching


def _named(name: str, prefix: str, parameters: Mapping[str, Shape]) -> str | None:
    """The parameter of this name, or with the base model's prefix added or removed; else None."""
    others = (name.removeprefix(prefix), prefix + name) if prefix != "." else ()
    return next((each for each in (name, *others) if each in parameters), None)


# The masks of one parameter, or of several that are saved together: the parameters with a mask;
# shapes of what is saved, by name in the checkpoint; and what makes these masks, in that order,
# of those of the parameters, None if one mask is saved unchanged.
SavedMasks = tuple[tuple[str, ...], dict[str, Shape], Conversion | None]


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
        return [((name,), {name: parameters[name]}, None) for name in masked]
    transforms = _Transforms(_backwards(pretrained), pretrained.config, parameters)
    saved: list[SavedMasks] = []
    # In the order in which transformers visits a state dict: some renamings depend on it.
    for name in sorted(parameters, key=natural_key):
        target, number, pattern = transforms.target_of(name)
        if number is not None:
            mask = name if name in masked else None
            transforms.add(target, number, (name, pattern, mask, parameters[name]))
        elif name in masked:
            saved.append(((name,), {transforms.rename(name): parameters[name]}, None))
    for conversion in transforms.conversions():
        if (step := conversion.computing_step) is not None:
            raise NotImplementedError(
                f"{conversion.names[0]}: transformers saves it by {step}, which may do more than "
                "move elements; expected names='model', which leaves masks as they are."
            )
        shapes = {transforms.rename(name): s for name, s in conversion.shapes().items()}
        saved.append((conversion.names, shapes, conversion))
    return saved


def _backwards(model: Any) -> list[Any]:
    """The transforms of saving, in order."""
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # the model was not loaded; then transformers adds no prefix on saving
        table = _transforms_of(model, add_legacy=False)
        transforms = [step for step in table if type(step).__name__ != "PrefixChange"]
    try:
        return [copy.deepcopy(step).reverse_transform() for step in reversed(transforms)]
    except NotImplementedError as error:
        raise NotImplementedError(
            "a conversion of this model has no reverse, so transformers does not save it as it "
            "was; expected names='model', which leaves masks as they are."
        ) from error


def build_without_weights(folder: str, dtype: torch.dtype | None) -> Any:
    """The model of a folder's config: parameters on the meta device, other buffers as they will be.

    It is what ``AutoModelForCausalLM.from_pretrained`` fills: in eval mode, tied, each parameter in
    the dtype that it will have, with the folder's generation config.

    Args:
        folder: a local one, with config.json.
        dtype: of the parameters; None: that of the config, else torch's default.

    Raises:
        NotImplementedError: the weights are quantised.
        OSError, ValueError: transformers cannot read the config, or it has code of its own.

    Cost: no memory for parameters.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError(
            f"{folder}: config.json has a quantization_config, so the stored numbers are codes, "
            "not weights; expected the checkpoint that it was made from."
        )
    if dtype is not None:
        config.dtype = dtype
    factory: Any = transformers.AutoModelForCausalLM
    options: Any = {"dtype": config.dtype or torch.get_default_dtype(), "trust_remote_code": False}
    model = empty_model(partial(factory.from_config, **options), config)
    model.config.name_or_path = folder
    model.tie_weights()
    if plan := model._get_dtype_plan(model.config.dtype):  # what transformers keeps in float32
        loading = importlib.import_module(_OPERATIONS_MODULE)
        pattern, by_group, *_ = loading.build_glob_alternation(list(plan))
        for name, parameter in model.named_parameters():
            if (match := pattern.search(name)) is not None:
                parameter.data = parameter.data.to(plan[by_group[match.lastgroup]])
    if model.can_generate():
        with contextlib.suppress(OSError):  # the folder has none: it is made from the config
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                folder, local_files_only=True
            )
    return model.eval()


def tensors_to_save(model: Any) -> dict[str, Tensor]:
    """The tensors of a model that ``save_pretrained`` writes; of tied ones, one."""
    modeling, state = sys.modules["transformers.modeling_utils"], dict(model.state_dict())
    return modeling.remove_tied_weights_from_state_dict(state, model)


def as_stored(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What ``save_pretrained`` writes of some tensors of a model, such as those of a layer."""
    loading = sys.modules[_OPERATIONS_MODULE]
    return loading.revert_weight_conversion(model, tensors)


def empty_model(make: Callable[[Any], Any], config: Any) -> Any:
    """What is made from a config: parameters on the meta device, other buffers as they will be."""
    import accelerate

    with accelerate.init_empty_weights(include_buffers=False):
        return make(config)


def decoder_layers(model: Any) -> list[nn.Module]:
    """The modules that transformers never splits over devices, outer ones first.

    Args:
        model: of transformers; FSDP2 may have given modules classes derived from theirs.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [m for m in model.modules() if names & {c.__name__ for c in type(m).__mro__}]


def put_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter or buffer in the place of the one of this full name."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


def names_by_tensor(tensors: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """The names of each tensor; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def tensors_of_checkpoints(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of a model: parameters and persistent buffers; tied ones each time.

    Without hooks of wrappers, unlike ``state_dict``.
    """
    saved = set(model.state_dict(keep_vars=True))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved:
            yield name, buffer
