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
        if type(value) not in _PLAIN:
            raise NotImplementedError(
                f"{self.label}: the weight of fused experts is a {type(value).__name__} while they "
                "run; expected a plain tensor with whole experts, as DDP and FSDP have them. Leave "
                "the parameter out."
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
        is_grouped = name in _GROUPED and rows.ndim == 2
        if not (is_grouped or func is functional.linear or func in _MATMUL):
            return False
        view = _view_of(matrix, value, 3 if is_grouped else 2)
        bounds = kwargs.get("offs", values[2] if len(values) > 2 else None)
        is_known = isinstance(bounds, Tensor) and bounds.shape == value.shape[:1]
        if (
            view is None
            or type(rows) not in _PLAIN
            or _lies_in(rows, _addresses(value))
            or (is_grouped and not is_known)
        ):
            raise _unknown(weight.label, func)
        expert, is_swapped = view
        if weight.input_dim != (2 if is_swapped != (func is functional.linear) else 1):
            raise NotImplementedError(
                f"{weight.label}: the fused experts are multiplied along dimension "
                f"{3 - weight.input_dim}, and `is_transposed` of their module says that their "
                f"inputs are along dimension {weight.input_dim}."
            )
        if not is_grouped:
            weight.add(expert, rows.reshape(-1, rows.shape[-1]))
            return True
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


def _view_of(matrix: Tensor, value: Tensor, ndim: int) -> tuple[int, bool] | None:
    """Which expert a tensor is a view of, and whether its dimensions are swapped.

    Args:
        matrix: an operand of a product.
        value: the weights of all experts.
        ndim: 2: a view of one expert's weight; 3: of all weights, from expert 0 on.

    Returns:
        None if it is no such view.
    """
    if type(matrix) not in _PLAIN or matrix.ndim != ndim or not (matrix.numel() or ndim == 3):
        return None
    found, own = (list(zip(t.shape, t.stride(), strict=True)) for t in (matrix, value))
    step = max(1, value.stride(0) * value.element_size())
    expert, rest = divmod(matrix.data_ptr() - value.data_ptr(), step)
    if rest or not 0 <= expert < value.shape[0] or (ndim == 3 and (expert or found[0] != own[0])):
        return None
    if found[-2:] == own[1:]:
        return expert, False
    return (expert, True) if found[-2:] == own[:0:-1] else None
