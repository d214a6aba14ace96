"""What fused experts multiply: seen while their module runs, as no layer is called with it.

[Note: fused experts] All experts of a layer are one parameter, [experts, out, in] or
[experts, in, out], and their module multiplies each matrix with the tokens that were routed to it.
A hook sees the tokens before they are routed, and nothing of what comes between two matrices. So
a TorchFunctionMode looks at every function of torch that the module calls, until it returns:

    F.linear(x, w[e]), x @ w[e]            rows x came to expert e
    grouped_mm(x, w, offs=offs)            rows offs[e - 1]:offs[e] came to e, those after the last
                                           to none
    views, w.shape, w.to(its own dtype)    nothing was multiplied
    anything else of the weight's memory   refused by name: what it meets is not known

w is what is registered under the parameter's name at that moment (sharded, gathered, masked or
not), w[e] the matrix at the address of expert e, each also transposed. A module that returns and
has not multiplied its weight in this way, in a kernel of its own, is refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from distprune.base.pruned_form import is_dtensor

_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
# Of torch, public from 2.10 on, and what transformers has where they do not run.
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback.default")
# Addresses of others mean nothing, or not that of the elements.
_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class FusedWeight:
    """A parameter of fused experts.

    Attributes:
        label: the parameter, for messages.
        module, name: its owner, and its name there.
        input_dim: the dimension of its inputs, 1 or 2.
        add: is called with the number of an expert, and the rows [tokens, inputs] that came to it.
    """

    label: str
    module: nn.Module
    name: str
    input_dim: int
    add: Callable[[int, Tensor], None]

    def value(self) -> Tensor:
        """What is registered under its name now.

        Raises:
            NotImplementedError: no plain tensor.
        """
        value: Tensor = getattr(self.module, self.name)
        if is_dtensor(value):
            raise NotImplementedError(
                f"{self.label}: fused experts whose weight is a DTensor while they run "
                f"({value.placements} on a mesh of shape {tuple(value.device_mesh.shape)}); "
                "expected whole experts, as DDP and FSDP have them. Leave the parameter out."
            )
        if type(value) not in _PLAIN:
            raise NotImplementedError(
                f"{self.label}: the weight of fused experts is a {type(value).__name__}; expected "
                "a plain tensor. Leave the parameter out."
            )
        return value


class RunningExperts(TorchFunctionMode):
    """Looks at what a module of fused experts does; see [Note: fused experts].

    Args:
        weights: parameters of one module.
        num_rows: of what the module is called with.

    Raises:
        NotImplementedError: a weight that is no plain tensor.

    Cost: tens of microseconds for each function that the module calls; one wait for the device for
    each grouped_mm.
    """

    def __init__(self, weights: Sequence[FusedWeight], num_rows: int) -> None:
        super().__init__()
        self.module = weights[0].module
        self._weights = weights
        self._num_rows = num_rows
        self._met: set[str] = set()
        for weight in weights:
            weight.value()

    def start(self) -> None:
        """Look from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Look no longer; the last that was started stops first."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raise NotImplementedError if a weight was not multiplied: the module has returned."""
        missed = [weight.label for weight in self._weights if weight.label not in self._met]
        if missed and self._num_rows:
            raise NotImplementedError(
                f"{', '.join(missed)}: {type(self.module).__name__} was called with "
                f"{self._num_rows} tokens, and multiplied the fused experts in no way that is "
                f"seen. {_EXPECTED}"
            )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        values = [*args, *kwargs.values()]
        for weight in self._weights:
            value = weight.value()
            addresses = _addresses(value)
            if not any(_lies_in(tensor, addresses) for tensor in _tensors(values)):
                continue
            if self._meet(weight, value, func, values, kwargs):
                self._met.add(weight.label)
            elif not all(
                not tensor.numel() or _lies_in(tensor, addresses) for tensor in _tensors([result])
            ):
                raise _unknown(weight.label, func)
        return result

    def _meet(
        self,
        weight: FusedWeight,
        value: Tensor,
        func: Callable[..., Any],
        values: list[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Add the inputs of a product; False if the function is none."""
        name = getattr(func, "__name__", "")
        if len(values) < 2 or not all(isinstance(each, Tensor) for each in values[:2]):
            return False
        rows, matrix = values[:2]
        if func is functional.linear or func in _MATMUL:
            found = _expert_of(matrix, value)
            dim = 1 if func is functional.linear else 0
            bounds = None
        elif name in _GROUPED and rows.ndim == 2:
            found = _whole(matrix, value)
            dim = 0
            bounds = kwargs.get("offs", values[2] if len(values) > 2 else None)
        else:
            return False
        if found is None or type(rows) not in _PLAIN or _lies_in(rows, _addresses(value)):
            raise _unknown(weight.label, func)
        expert, is_swapped = found
        if (2 - dim if is_swapped else 1 + dim) != weight.input_dim:
            raise NotImplementedError(
                f"{weight.label}: the fused experts are multiplied along dimension "
                f"{3 - weight.input_dim}, and `is_transposed` of their module says that their "
                f"inputs are along dimension {weight.input_dim}."
            )
        if name not in _GROUPED:
            weight.add(expert, rows.reshape(-1, rows.shape[-1]))
            return True
        if not isinstance(bounds, Tensor) or bounds.shape != value.shape[:1]:
            raise _unknown(weight.label, func)
        start = 0
        for number, stop in enumerate(bounds.tolist()):
            weight.add(number, rows[start:stop])
            start = stop
        return True


_EXPECTED = (
    "Expected F.linear or @ with the matrix of one expert, or grouped_mm with all, as "
    'transformers\' experts do after model.set_experts_implementation("eager") or '
    '"grouped_mm". Or leave these parameters out.'
)


def _unknown(label: str, func: Callable[..., Any]) -> NotImplementedError:
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", str(func))
    return NotImplementedError(
        f"{label}: {name} uses the weight of fused experts, and which tokens come to which expert "
        f"is not seen there. {_EXPECTED}"
    )


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, Tensor))


def _addresses(value: Tensor) -> range:
    """Where the elements of a plain tensor lie in memory."""
    if not value.numel():
        return range(0)
    pairs = zip(value.shape, value.stride(), strict=True)
    size = 1 + sum((length - 1) * stride for length, stride in pairs)
    start = value.data_ptr()
    return range(start, start + size * value.element_size())


def _lies_in(tensor: Tensor, addresses: range) -> bool:
    """Whether a tensor is a view of what lies at some addresses."""
    return type(tensor) in _PLAIN and bool(tensor.numel()) and tensor.data_ptr() in addresses


def _expert_of(matrix: Tensor, value: Tensor) -> tuple[int, bool] | None:
    """(expert, is_transposed) if ``matrix`` is a view of one expert's weight, else None."""
    is_swapped = _is_swapped(matrix, value, 2)
    if is_swapped is None or not matrix.numel():
        return None
    step = value.stride(0) * value.element_size()
    expert, rest = divmod(matrix.data_ptr() - value.data_ptr(), max(1, step))
    return None if rest or not 0 <= expert < value.shape[0] else (expert, is_swapped)


def _whole(matrices: Tensor, value: Tensor) -> tuple[int, bool] | None:
    """(0, is_transposed) if ``matrices`` is a view of the weights of all experts, else None."""
    is_swapped = _is_swapped(matrices, value, 3)
    if is_swapped is None or matrices.data_ptr() != value.data_ptr():
        return None
    is_same = (matrices.shape[0], matrices.stride(0)) == (value.shape[0], value.stride(0))
    return (0, is_swapped) if is_same else None


def _is_swapped(matrix: Tensor, value: Tensor, ndim: int) -> bool | None:
    """Whether the last two dimensions are swapped ones of a weight; None if they are of none."""
    if type(matrix) not in _PLAIN or matrix.ndim != ndim:
        return None
    found = list(zip(matrix.shape, matrix.stride(), strict=True))[-2:]
    own = list(zip(value.shape, value.stride(), strict=True))[1:]
    if found == own:
        return False
    return True if found == own[::-1] else None
