"""Adding up the inputs of layers, by hooks that change nothing.

What a layer is called with counts at once. After a forward that raised it is not known which inputs
of it have counted: new statistics are needed.

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

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as of_modules
from torch.overrides import TorchFunctionMode

from distprune.base.pruned_form import ORIG, is_dtensor
from distprune.ranks.collectives import with_whole_dim
from distprune.statistics.parameters import (
    Convolution,
    Entry,
    Part,
    as_dtensor,
    read_input,
    sums_of_rows,
)

_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
# Of torch, public from 2.10 on, and what transformers has where they do not run.
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback.default")
# Addresses of others mean nothing, or not that of the elements.
_PLAIN = (Tensor, nn.Parameter)
_EXPECTED = (
    "Expected F.linear or @ with the matrix of one expert, or grouped_mm with all: "
    'model.set_experts_implementation("eager") or ("grouped_mm") of transformers.'
)


class Collector:
    """Adds up what layers are called with; a part of :class:`ActivationStatistics`."""

    _NEEDS_WHOLE_ROWS = False  # whether a sum needs all features of a token on one rank

    def __init__(self) -> None:
        # Ranks that run the model on the same tokens as this one, as the inputs of layers tell.
        self._same_tokens: set[tuple[int, ...]] = set()
        self._has_failed = False  # a forward, or a batch, has raised
        self._keep: Tensor | None = None  # of the present batch: bool [batch, tokens], no padding
        # By module, the parameters that it has, and their names there; None: nothing is collected.
        self._layers: dict[nn.Module, list[tuple[Entry, str]]] | None = None
        self._running: list[RunningExperts] = []
        self._num_open = 0  # calls of modules that have begun and not returned

    @contextlib.contextmanager
    def _collecting(self, parameters: Sequence[Entry]) -> Iterator[None]:
        """Collect while the context is open: no gradients, compiled models run uncompiled.

        Raises:
            RuntimeError: it is open already.
        """
        if self._layers is not None:
            raise RuntimeError("collecting() is open already; expected one at a time.")

        def begin_experts(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            self._begin_experts(module, args, kwargs)

        thread = threading.get_ident()

        def here(call: Callable[..., None]) -> Callable[..., None]:
            def hook(*args: Any) -> None:
                if threading.get_ident() == thread:
                    call(*args)

            return hook

        self._layers, self._num_open = {}, 0
        experts: dict[nn.Module, None] = {}
        handles = []
        try:
            for parameter in parameters:
                for module, name in parameter.places:
                    self._layers.setdefault(module, []).append((parameter, name))
                    if parameter.layout.are_experts:
                        experts[module] = None
            for module in experts:
                # Runs after the hooks that are there, such as those of FSDP, which gather weights.
                # A function, as copies of the module would copy a method together with its object.
                handles.append(module.register_forward_pre_hook(begin_experts, with_kwargs=True))
            # Calls of all modules: global hooks, which copies of a module do not have. Arguments
            # are as the module's own hooks have changed them; the last also runs after an error.
            after = of_modules.register_module_forward_hook
            handles += [
                of_modules.register_module_forward_pre_hook(here(self._begin)),
                after(here(self._returned), with_kwargs=True),
                after(here(self._end), always_call=True),
            ]
            with torch.no_grad(), _uncompiled():
                yield
        finally:
            self._has_failed |= self._num_open > 0
            for handle in handles:
                handle.remove()
                # Handles forget this one, and torch.compile would warn of global hooks for ever.
                of_modules._global_forward_hooks_with_kwargs.pop(handle.id, None)
            while self._running:  # of a forward that was interrupted
                self._stop_experts()
            self._layers = None

    @contextlib.contextmanager
    def batch(self, attention_mask: Tensor | None = None) -> Iterator[None]:
        """One batch, without its padding: a context around its forward, or its forwards.

        Args:
            attention_mask: bool or integers [batch, tokens] of this rank's batch, 0 = padding.
                Layers may see [batch, tokens, features] or [batch * tokens, features]. None: all
                tokens count.

        Raises:
            ValueError: a DTensor, another dtype or shape; in the forward, a layer whose input does
                not fit.
            NotImplementedError: in the forward, a convolution, or fused experts if only a part of
                the batch is padding.
        """
        before = self._keep
        if attention_mask is not None:
            dtype, shape = attention_mask.dtype, tuple(attention_mask.shape)
            if is_dtensor(attention_mask) or dtype.is_floating_point or len(shape) != 2:
                raise ValueError(
                    f"attention_mask is {dtype} of shape {shape}; expected a plain tensor [batch, "
                    "tokens] of this rank, of booleans or integers, where 0 is padding."
                )
            self._keep = attention_mask != 0
        try:
            yield
        except BaseException:  # some of its forwards may have counted
            self._has_failed = True
            raise
        finally:
            self._keep = before

    def _add(
        self, parameter: Entry, part: Part, inputs: Tensor, keep: Tensor | None = None
    ) -> None:
        """Add what the weight of a parameter was multiplied with; see :func:`read_input`."""
        # Of a mask, not as an integer: a device would wait for it.
        count = len(inputs) if keep is None else keep.sum()
        sums = sums_of_rows(inputs, keep)
        if part in parameter.seen:
            before, earlier = parameter.seen[part]
            count, sums = count + before, sums + earlier.to(sums.device)
        parameter.seen[part] = count, sums

    def _begin(self, module: nn.Module, *_: Any) -> None:
        self._num_open += 1

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        """Add what a layer was called with, or check what fused experts did."""
        assert self._layers is not None
        for parameter, name in self._layers.get(module, ()):
            if not parameter.layout.are_experts:
                value = _checked_input(parameter.label, args, kwargs)
                with _computing(value):
                    self._add_input(parameter, name, module, value)
        if self._running and self._running[-1].module is module:
            self._running[-1].check()
        self._num_open -= 1

    def _end(self, module: nn.Module, *_: Any) -> None:
        """Look no longer at fused experts, before FSDP shards the weights again."""
        if self._running and self._running[-1].module is module:
            self._stop_experts()

    def _stop_experts(self) -> None:
        self._running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _begin_experts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at what fused experts do until they return: a forward pre-hook."""
        places = (self._layers or {}).get(module)
        if places is None:  # a copy shares hooks
            return
        label = places[0][0].label
        value = _checked_input(label, args, kwargs)
        num_kept = -1 if self._keep is None else int(self._keep.sum())
        if self._keep is not None and num_kept not in (0, self._keep.numel()):
            raise NotImplementedError(
                f"{label}: fused experts see tokens in an order of which attention_mask does not "
                "tell; expected batches that are all padding, or have none."
            )
        if getattr(module, "_is_expert_parallel", False) or is_dtensor(value):
            raise NotImplementedError(
                f"{label}: the experts are spread over ranks (expert parallelism), or called with "
                "a DTensor; expected whole experts and plain tensors, as under DDP and FSDP."
            )
        if num_kept:
            running = RunningExperts(module, places, value.shape[:-1].numel(), self._add_expert)
            self._running.append(running)
            running.__enter__()  # type: ignore[no-untyped-call]

    def _add_input(self, parameter: Entry, name: str, module: nn.Module, value: Tensor) -> None:
        label, layout = parameter.label, parameter.layout
        convolution = module if isinstance(module, Convolution) else None
        if convolution is not None and self._keep is not None:
            raise NotImplementedError(
                f"{label}: an attention_mask says nothing of the windows of a convolution; "
                "expected no attention_mask, or this parameter left out."
            )
        weight = module._parameters.get(name, module._parameters.get(name + ORIG))
        if is_dtensor(weight) and not is_dtensor(value):
            value = as_dtensor(label, value, weight, layout)
        if self._NEEDS_WHOLE_ROWS and is_dtensor(value):
            dim = value.ndim - 1 - (0 if convolution is None else len(convolution.kernel_size))
            value = with_whole_dim(value, dim)
        keep = None if self._keep is None else self._keep.to(value.device)
        for part, rows, kept in read_input(label, value, keep, convolution):
            self._add(parameter, part, rows, kept)
            if part.token_ranks is not None:
                self._same_tokens.add(part.token_ranks)

    def _add_expert(self, parameter: Entry, expert: int, rows: Tensor) -> None:
        """Add the rows [tokens, inputs] that came to one of fused experts."""
        num_inputs = parameter.layout.input_shape[1]
        if len(rows):
            part = Part(range(expert * num_inputs, (expert + 1) * num_inputs))
            with _computing(rows):
                self._add(parameter, part, rows.detach())


def _checked_input(label: str, args: Any, kwargs: Any) -> Tensor:
    """What a layer is called with, in a call that counts."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{label}: its layer runs with gradients enabled, inside collecting(): activation "
            "checkpointing would run it twice. Expected a forward without torch.enable_grad()."
        )
    return args[0] if args else next(iter(kwargs.values()))


@contextlib.contextmanager
def _computing(value: Tensor) -> Iterator[None]:
    """Compute in the dtypes of tensors, and make normal tensors, whatever the model runs in."""
    autocast = torch.autocast(value.device.type, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast:
        yield


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled modules uncompiled: a graph that was compiled before has no hooks in it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    set_stance: Callable[..., contextlib.AbstractContextManager[Any]] = torch.compiler.set_stance
    with set_stance("force_eager"), warnings.catch_warnings():
        # They are seen once more at the compiled module around a module, which does no harm.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
        yield


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
        places: Sequence[tuple[Entry, str]],
        num_rows: int,
        add: Callable[[Entry, int, Tensor], None],
    ) -> None:
        super().__init__()
        self.module = module
        self._places = places
        self._num_rows = num_rows
        self._add = add
        self._multiplied: set[str] = set()
        for each in places:
            self._weight(*each)

    def _weight(self, parameter: Entry, name: str) -> Tensor:
        """What is registered under a parameter's name now; NotImplementedError if not plain."""
        value: Tensor = getattr(self.module, name)
        if type(value) not in _PLAIN:
            raise NotImplementedError(
                f"{parameter.label}: the weight of fused experts is a {type(value).__name__} while "
                "they run; expected a plain tensor with whole experts, as DDP and FSDP have them."
            )
        return value

    def check(self) -> None:
        """Raise NotImplementedError if a weight was not multiplied: the module has returned."""
        labels = [parameter.label for parameter, _ in self._places]
        missed = [label for label in labels if label not in self._multiplied]
        if missed and self._num_rows:
            raise NotImplementedError(
                f"{', '.join(missed)}: {type(self.module).__name__}, called with {self._num_rows} "
                f"tokens, multiplied the fused experts in no way that is seen. {_EXPECTED}"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        self, parameter: Entry, weight: Tensor, func: Any, values: list[Any], kwargs: Any
    ) -> None:
        """Add the inputs of a product of rows and the weights of one expert, or of all."""
        rows, matrix = values[:2]
        is_grouped = _name_of(func) in _GROUPED
        bounds = kwargs.get("offs", values[2] if len(values) > 2 else None)
        has_bounds = isinstance(bounds, Tensor) and bounds.shape == weight.shape[:1]
        is_swapped = (func is functional.linear) != (parameter.layout.input_dim == 2)
        expert = _expert_of(matrix, weight, is_grouped, is_swapped)
        if (
            expert is None
            or type(rows) not in _PLAIN
            or _lies_in(rows, weight)
            or (is_grouped and not (rows.ndim == 2 and has_bounds))
        ):
            raise _unknown(parameter.label, func)
        if not is_grouped:
            self._add(parameter, expert, rows.reshape(-1, rows.shape[-1]))
            return
        start = 0
        for number, stop in enumerate(bounds.tolist()):
            self._add(parameter, number, rows[start:stop])
            start = stop


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


def _expert_of(matrix: Any, weight: Tensor, is_whole: bool, is_swapped: bool) -> int | None:
    """Which expert's weight a tensor is, or None.

    Args:
        matrix: an operand of a product.
        weight: of all experts.
        is_whole: whether it should be that of all of them, from expert 0 on.
        is_swapped: whether its last two dimensions should be in the other order.
    """
    if not isinstance(matrix, Tensor) or not _lies_in(matrix, weight):
        return None
    step = max(1, weight.stride(0) * weight.element_size())
    expert = 0 if is_whole else (matrix.data_ptr() - weight.data_ptr()) // step
    view = weight if is_whole else weight[expert]
    view = view.mT if is_swapped else view
    is_same = matrix.shape == view.shape and matrix.stride() == view.stride()
    return expert if is_same and matrix.data_ptr() == view.data_ptr() else None
