"""Record what crosses the network: every collective that torch's dispatcher runs."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
NOT_COLLECTIVE = ("wait_tensor", "barrier", "monitored_barrier_")


class Traffic(TorchDispatchMode):
    """Records (operation, bytes of all its tensors) of each collective, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if func.namespace in NAMESPACES and name not in NOT_COLLECTIVE:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.calls.append((name, sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **kwargs)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.calls)
