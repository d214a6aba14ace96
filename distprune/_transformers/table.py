"""transformers' own conversion table of a model, and its operations at work on masks.

transformers 5 renames tensors when it loads a checkpoint, and merges, splits, transposes and
permutes some (the experts of a mixture become one tensor); when it saves, it does the reverse.
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.naming import named_modules, unwrap
from distprune._transformers.mask_matching import Shape

_OPERATIONS_MODULE = "transformers.core_model_loading"
# Operations that move elements, and neither compute with them nor leave some out.
MOVING_OPERATIONS = frozenset({
    "Chunk", "Concatenate", "Conv3dToLinear", "ErnieFuseAndSplitTextVisionExperts",
    "ErnieSplitAndDecoupleTextVisionExperts", "Interleave", "LinearToConv3d", "MergeModulelist",
    "PermuteForRope", "Split", "SplitModulelist", "Transpose", "VisionFuseAndPermuteForRope",
    "VisionUnfuseAndPermuteForRope",
})  # fmt: skip


@dataclass(frozen=True)
class Input:
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
class Conversion:
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
    inputs: list[Input]
    config: Any
    model: Any

    def run(self, tensor_of: Callable[[Input], Tensor]) -> dict[str, Tensor]:
        """Tensors by the names of the parameters."""
        converter = copy.deepcopy(self.converter)
        for each in self.inputs:
            converter.add_tensor(self.target, each.renamed, each.pattern, tensor_of(each))
        made = converter.convert(self.target, model=self.model, config=self.config)
        if isinstance(made, tuple):  # with errors, in the first versions of transformers 5
            made = made[0]
        return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}

    def shapes(self) -> dict[str, Shape]:
        """Of what :meth:`run` makes; nothing is computed."""
        made = self.run(lambda each: torch.empty(each.shape, dtype=torch.bool, device="meta"))
        return {name: tuple(value.shape) for name, value in made.items()}


class Shapes:
    """What operations ask of a model: the shapes of its parameters, by their plain names."""

    def __init__(self, parameters: Mapping[str, Shape]) -> None:
        self._parameters = parameters

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._parameters[name], dtype=torch.bool, device="meta")


def _stand_in(model: Any) -> Any:
    """What transformers' table asks of a model: its models by their plain names and own classes.

    Wrappers change both.
    """

    def listed() -> Iterator[tuple[str, Any]]:
        base = sys.modules["transformers.modeling_utils"].PreTrainedModel
        for name, module in named_modules(model):
            if isinstance(module, base):
                yield name, _bare(module)

    root = _bare(model)
    object.__setattr__(root, "named_modules", listed)
    return root


def _bare(model: Any) -> Any:
    """An object of a model's own class, with its configuration and nothing else."""
    cls = _own_class(model, sys.modules["transformers.modeling_utils"].PreTrainedModel)
    bare: Any = object.__new__(cls)
    object.__setattr__(bare, "config", model.config)
    return bare


def _own_class(module: nn.Module, base: type) -> type:
    """The class of a model before FSDP2 put another one in its place."""
    sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return next(
        cls
        for cls in type(module).__mro__
        if issubclass(cls, base) and not issubclass(cls, sharded)
    )


def pretrained_model(model: nn.Module) -> Any | None:
    """A model of transformers without its wrapper; None if it is not one of its models."""
    modeling = sys.modules.get("transformers.modeling_utils")  # or nobody has such a model
    model = unwrap(model)
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    return model


def transforms_of(model: Any, *, add_legacy: bool = True) -> list[Any]:
    """What transformers does on loading, in order; nothing before transformers 5.

    Args:
        model: of transformers, unwrapped.
        add_legacy: with the renamings of old checkpoints of any model.
    """
    try:
        table = importlib.import_module("transformers.conversion_mapping")
    except ImportError:  # transformers 4 renames nothing by a table
        return []
    try:
        listed = table.get_model_conversion_mapping(_stand_in(model), add_legacy=add_legacy)
    except (AttributeError, TypeError) as error:
        version = sys.modules["transformers"].__version__
        warnings.warn(
            f"the conversion table of transformers {version} cannot be read ({error}), so masks "
            "are matched by names alone; expected a version from 5.0 to 5.23.",
            stacklevel=2,
        )
        return []
    # Those that a user gave to from_pretrained (key_mapping) go first, as they did there.
    used = getattr(model, "_weight_conversions", None) or []
    known = {_patterns(each) for each in listed}
    own = [copy.deepcopy(each) for each in used if _patterns(each) not in known]
    return [*own, *listed]


def _patterns(transform: Any) -> tuple[Any, ...]:
    return (
        type(transform).__name__,
        tuple(transform.source_patterns),
        tuple(transform.target_patterns),
        getattr(transform, "scope_prefix", None),
    )


def only_moves(operation: Any) -> bool:
    cls = type(operation)
    return cls.__module__ == _OPERATIONS_MODULE and cls.__name__ in MOVING_OPERATIONS
