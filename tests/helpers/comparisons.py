"""Comparisons that run on every rank. Each returns a list of differences in words.

They do not raise: a rank that raised during a test would leave the others in a collective.
"""

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from distprune import PruningContainer
from distprune.testing import run_ranks
from helpers.models import target
from helpers.wrappings import local, my_part, unwrapped, world_size


def wrong_masks(
    model: nn.Module, keeps: dict[str, Tensor], indices: dict[str, Tensor], when: str = ""
) -> list[str]:
    """Compare the mask shards that this rank holds with its parts of full masks, bit for bit."""
    wrong = []
    for name, keep in keeps.items():
        module, parameter = target(unwrapped(model), name)
        held, expected = local(getattr(module, parameter + "_mask")), my_part(keep, indices[name])
        if held.shape != expected.shape:
            wrong.append(f"{when} {name}: shape {list(held.shape)}, not {list(expected.shape)}")
        elif not torch.equal(held.double(), expected.double()):
            wrong.append(f"{when} {name}:\nheld     {_row(held)}\nexpected {_row(expected)}")
    return wrong


def _row(mask: Tensor) -> str:
    return " ".join(f"{value:g}" for value in mask.double().flatten().tolist())


def assert_nothing_wrong(per_rank: Iterable[list[str]]) -> None:
    """Fail with the differences that the ranks found: the result of run_ranks."""
    __tracebackhide__ = True
    text = "\n".join(
        f"[rank {rank}] {message}" for rank, wrong in enumerate(per_rank) for message in wrong
    )
    assert not text, text[:5000]


def assert_nothing_wrong_on(
    wrapping: str, differences: Callable[..., list[str]], *args: object, **kwargs: object
) -> None:
    """Fail with what ``differences(wrapping, ...)`` finds on the ranks of a wrapping."""
    __tracebackhide__ = True
    assert_nothing_wrong(run_ranks(differences, world_size(wrapping), wrapping, *args, **kwargs))


def assembled(parts: Iterable[tuple[Tensor, Tensor]], shape: tuple[int, ...]) -> Tensor:
    """Assemble (values, indices) of all ranks. Replicas must agree; no element may be missing."""
    full = torch.zeros(shape).flatten()
    seen = torch.zeros(shape, dtype=torch.bool).flatten()
    for held, indices in parts:
        held, indices = held.flatten().float(), indices.flatten()
        known = seen[indices]
        assert torch.equal(full[indices][known], held[known]), "replicas hold different values"
        full[indices] = held
        seen[indices] = True
    assert seen.all(), "some elements are on no rank"
    return full.view(shape)


def snapshot(model: nn.Module) -> dict[str, object]:
    """Return everything that pruning may change in a model, to be compared with ==."""
    state: dict[str, object] = {}
    for path, module in model.named_modules():
        state[f"{path} class"] = type(module)
        state[f"{path} attributes"] = sorted(vars(module))
        state[f"{path} names"] = [*module._parameters, *module._buffers]
        state[f"{path} hooks"] = [*module._forward_pre_hooks, *module._forward_hooks]
        methods = module._forward_pre_hooks.values()
        state[f"{path} methods"] = [len(m) for m in methods if isinstance(m, PruningContainer)]
    for name, parameter in model.named_parameters():
        state[f"{name} object"] = id(parameter)
        # A copy: FSDP1 cannot resize what numpy refers to.
        state[f"{name} values"] = bits(local(parameter).clone())
        # Not their numbers: a hook that was taken off and put back has another one.
        hooks = (parameter._post_accumulate_grad_hooks or {}).values()
        state[f"{name} hooks"] = [getattr(hook, "args", hook) for hook in hooks]
    for name, buffer in model.named_buffers():
        state[f"{name} values"] = bits(local(buffer))
    return state


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def outcome(model: nn.Module, call: Callable[[], object]) -> tuple[str, str, list[str]]:
    """(built-in type, text, what changed all the same) of the error that a call raises."""
    before = snapshot(model)
    try:
        call()
        error = ("nothing", "")
    except BaseException as raised:
        error = (kind_of(raised), str(raised))
    return *error, changes(before, snapshot(model))


def raised(call: Callable[[], object]) -> str:
    """Type and text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def other_errors(per_rank: Iterable, kind: str, text: str, when: str = "") -> list[str]:
    """The outcomes of ranks that are not this: a type, a text with a pattern, no changes."""
    return [
        f"{when} [rank {rank}] {found}: {message}; changed {changed}"
        for rank, (found, message, changed) in enumerate(per_rank)
        if found != kind or not re.search(text, message) or changed
    ]


def kind_of(error: BaseException) -> str:
    """The name of the built-in type that an error is of."""
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins")
