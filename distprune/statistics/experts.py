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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from distprune.statistics.parameters import ParameterStatistics

_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
# Of torch, public from 2.10 on, and what transformers has where they do not run.
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback.default")
# Addresses of others mean nothing, or not that of the elements.
_PLAIN = (Tensor, nn.Parameter)


class RunningExperts(TorchFunctionMode):
    """Looks at what a module of fused experts does; see [Note: fused experts].

    Args:
        module: of fused experts.
        places: its parameters, and their names there.
        num_rows: of what the module is called with.
        add: is called with a parameter, the number of an expert, and the rows [tokens, inputs] that
            came to it.

    Raises:
        NotImplementedError: a weight that is no plain tensor.

    Cost: tens of microseconds for each function that the module calls; one wait for the device for
    each grouped_mm.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[tuple[ParameterStatistics, str]],
        num_rows: int,
        add: Callable[[ParameterStatistics, int, Tensor], None],
    ) -> None:
        super().__init__()
        self.module = module
        self._places = places
        self._num_rows = num_rows
        self._add = add
        self._multiplied: set[str] = set()
        for parameter, name in places:
            self._weight(parameter, name)

    def _weight(self, parameter: ParameterStatistics, name: str) -> Tensor:
        """What is registered under a parameter's name now; NotImplementedError if not plain."""
        value: Tensor = getattr(self.module, name)
        if type(value) not in _PLAIN:
            raise NotImplementedError(
                f"{parameter.label}: the weight of fused experts is a {type(value).__name__} while "
                "they run; expected a plain tensor with whole experts, as DDP and FSDP have them. "
                "Leave the parameter out."
            )
        return value

    def start(self) -> None:
        """Look from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Look no longer; the last that was started stops first."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raise NotImplementedError if a weight was not multiplied: the module has returned."""
        labels = [parameter.label for parameter, _ in self._places]
        missed = [label for label in labels if label not in self._multiplied]
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
        for parameter, name in self._places:
            weight = self._weight(parameter, name)
            if not any(_lies_in(tensor, weight) for tensor in _tensors(values)):
                continue
            if func is functional.linear or func in _MATMUL or _name_of(func) in _GROUPED:
                self._add_product(parameter, weight, func, values, kwargs)
                self._multiplied.add(parameter.label)
            # A view of the weight multiplies nothing.
            elif not all(_lies_in(each, weight) for each in _tensors([result]) if each.numel()):
                raise _unknown(parameter.label, func)
        return result

    def _add_product(
        self,
        parameter: ParameterStatistics,
        weight: Tensor,
        func: Callable[..., Any],
        values: list[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Add the inputs of a product of rows and the weights of one expert, or of all."""
        rows, matrix = values[:2]
        is_grouped = _name_of(func) in _GROUPED
        bounds = kwargs.get("offs", values[2] if len(values) > 2 else None)
        has_bounds = isinstance(bounds, Tensor) and bounds.shape == weight.shape[:1]
        view = _view_of(matrix, weight, is_grouped)
        if (
            view is None
            or type(rows) not in _PLAIN
            or _lies_in(rows, weight)
            or (is_grouped and not (rows.ndim == 2 and has_bounds))
        ):
            raise _unknown(parameter.label, func)
        expert, is_swapped = view
        input_dim = parameter.layout.input_dim
        if input_dim != (2 if is_swapped != (func is functional.linear) else 1):
            raise NotImplementedError(
                f"{parameter.label}: the fused experts are multiplied along dimension "
                f"{3 - input_dim}, and `is_transposed` of their module says that their inputs are "
                f"along dimension {input_dim}."
            )
        if not is_grouped:
            self._add(parameter, expert, rows.reshape(-1, rows.shape[-1]))
            return
        start = 0
        for number, stop in enumerate(bounds.tolist()):
            self._add(parameter, number, rows[start:stop])
            start = stop


_EXPECTED = (
    "Expected F.linear or @ with the matrix of one expert, or grouped_mm with all, as "
    'transformers\' experts do after model.set_experts_implementation("eager") or '
    '"grouped_mm". Or leave these parameters out.'
)


def _unknown(label: str, func: Callable[..., Any]) -> NotImplementedError:
    name = getattr(func, "__qualname__", None) or _name_of(func)
    return NotImplementedError(
        f"{label}: {name} uses the weight of fused experts, and which tokens come to which expert "
        f"is not seen there. {_EXPECTED}"
    )


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among values, and in lists and tuples of them."""
    for value in values:
        every = value if isinstance(value, (list, tuple)) else [value]
        yield from (each for each in every if isinstance(each, Tensor))


def _lies_in(tensor: Tensor, weight: Tensor) -> bool:
    """Whether a tensor is a view of the elements of a plain one."""
    if type(tensor) not in _PLAIN or not tensor.numel() or not weight.numel():
        return False
    pairs = zip(weight.shape, weight.stride(), strict=True)
    size = 1 + sum((length - 1) * stride for length, stride in pairs)
    return 0 <= tensor.data_ptr() - weight.data_ptr() < size * weight.element_size()


def _view_of(matrix: Any, weight: Tensor, is_whole: bool) -> tuple[int, bool] | None:
    """Which expert a tensor is a view of, and whether its dimensions are swapped.

    Args:
        matrix: an operand of a product.
        weight: of all experts.
        is_whole: whether it should be a view of all of them, from expert 0 on.

    Returns:
        None if it is no such view.
    """
    if not isinstance(matrix, Tensor) or not _lies_in(matrix, weight):
        return None
    step = max(1, weight.stride(0) * weight.element_size())
    expert = 0 if is_whole else (matrix.data_ptr() - weight.data_ptr()) // step
    view = weight if is_whole else weight[expert]
    for is_swapped, each in enumerate((view, view.mT)):
        same_place = matrix.data_ptr() == each.data_ptr() and matrix.stride() == each.stride()
        if same_place and matrix.shape == each.shape:
            return expert, bool(is_swapped)
    return None
