"""Ten steps of a model that is pruned twice, beside one process: any layout, any optimizer."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import distprune as prune
from helpers import reference
from helpers.wrappings import local

NUM_STEPS = 10


def wrong_steps(
    places: list[tuple[nn.Module, str]],
    dense: list[tuple[nn.Module, str]],
    mine: Callable[[int, Tensor], Tensor],
    held: Callable[[int], Tensor],
    step: Callable[[int], None],
    step_of_one: Callable[[int], None],
) -> list[str]:
    """Steps of a sharded model and of one process, with two prunings; then masks come off.

    Args:
        places, dense: (module, name) of the parameters that are pruned, on shards and whole.
        mine: the elements of a whole parameter that this rank holds, by its number.
        held: what this rank holds.
        step, step_of_one: make a step, without the zeros of one process.
    """
    values = [module._parameters[name] for module, name in dense]
    keeps, wrong = [torch.ones(value.shape, dtype=torch.bool) for value in values], []
    # One process: gradients and values are zero where the mask is.
    hooks = [v.register_hook(lambda g, i=i: g * keeps[i]) for i, v in enumerate(values)]
    for number in range(NUM_STEPS):
        if number in (2, 6):
            keeps[:] = reference.prune([value.detach() for value in values], 0.4, keeps)
            prune.global_unstructured(places, prune.L1Unstructured, amount=0.4)
        for value, keep in zip(values, keeps, strict=True):
            value.data.mul_(keep)
        step(number)
        step_of_one(number)
        for i, (value, keep, (module, name)) in enumerate(zip(values, keeps, places, strict=True)):
            value.data.mul_(keep)
            own = mine(i, keep)
            if number >= 2 and not torch.equal(
                local(getattr(module, name + "_mask")).view(-1), own.view(-1)
            ):
                wrong.append(f"step {number}: the mask of {i}")
            if not torch.allclose(
                held(i).view(-1), mine(i, value.detach()).view(-1), rtol=0, atol=1e-6
            ):
                wrong.append(f"step {number}: the values of {i}")
            if bool(held(i).view(-1)[~own.view(-1)].any()):
                wrong.append(f"step {number}: {i} is not zero where it is pruned")
    for hook in hooks:
        hook.remove()
    for i, ((module, name), keep) in enumerate(zip(places, keeps, strict=True)):
        prune.verify(module)
        module.load_state_dict(module.state_dict())
        prune.remove(module, name)
        if hasattr(module, name + "_mask") or bool(held(i).view(-1)[~mine(i, keep).view(-1)].any()):
            wrong.append(f"{i} is no ordinary parameter with zeros after remove")
    dist.barrier()
    return wrong
