"""A sharded model and its reference, trained side by side: see Pair and train.

The reference is a dense copy on every rank, pruned by torch.nn.utils.prune with the masks of the
oracle, and with zeros in its weights where the sharded model holds zeros. Masks are compared
exactly; floats to 1e-5: the ranks sum gradients in another order.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import distprune as prune
from distprune.base.naming import named_modules
from helpers import reference, wrappings
from helpers.models import Net, fill, target

WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": False}),
}
NUM_STEPS = 10
TOLERANCE = 1e-5


class Recomputing(Net):
    """Net with activation checkpointing inside its forward, in both of torch's ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda t: torch.relu(self.l1(t)), x, use_reentrant=False)
        x = checkpoint(lambda t: torch.tanh(self.l2(t)), x, use_reentrant=True)
        return checkpoint(self.l3, x, use_reentrant=False)


class Pair:
    """The two models, their masks, and the differences found.

    Args:
        wrapping: see wrappings.py.
        recompute: activation checkpointing: "", "inside" forward, or by a "wrapper".
        compiler: backend for torch.compile; "" for none.
        fsdp_options: for fully_shard, or FullyShardedDataParallel.
    """

    def __init__(self, wrapping: str, recompute: str = "", compiler: str = "", **fsdp_options: Any):
        sizes = wrappings.runnable_sizes(wrapping)
        self.dense = fill(Net(sizes), "normal", "float32")
        self.indices = wrappings.local_indices(self.dense, wrapping, **fsdp_options)
        model = Recomputing(sizes) if recompute == "inside" else Net(sizes)
        fill(model, "normal", "float32")
        if recompute == "wrapper":
            model.l1, model.l3 = checkpoint_wrapper(model.l1), checkpoint_wrapper(model.l3)
        self.model = wrappings.wrap(model, wrapping, **fsdp_options)
        self.run = torch.compile(self.model, backend=compiler) if compiler else self.model
        self.modules = dict(named_modules(self.model))
        self.part, self.num_parts = wrappings.data_rank(wrapping)
        # torch cannot stack the norms of parameters on different meshes.
        self.can_clip = "tp" not in wrappings.kind_of(wrapping)
        self.wrapping = wrapping
        self.keeps: dict[str, Tensor] = {}
        self.wrong: list[str] = []
        self.largest_difference = 0.0  # of a weight or a bias, over all steps
        self.num_mask_differences = 0

    def target(self, name: str) -> tuple[nn.Module, str]:
        path, _, parameter = name.rpartition(".")
        return self.modules[path], parameter

    def prune(self, amount: float, inference: bool = False) -> None:
        name = "weight_orig" if self.keeps else "weight"
        modules = [target(self.dense, weight)[0] for weight in WEIGHTS]
        scores = [getattr(module, name).detach().clone() for module in modules]
        keeps = reference.prune(scores, amount, list(self.keeps.values()) or None)
        for module, keep in zip(modules, keeps, strict=True):
            torch_prune.custom_from_mask(module, "weight", keep)
        targets = [self.target(weight) for weight in WEIGHTS]
        with torch.inference_mode(inference):
            prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)
        self.keeps = dict(zip(WEIGHTS, keeps, strict=True))

    def remove(self) -> None:
        for name in WEIGHTS:
            torch_prune.remove(*target(self.dense, name))
            prune.remove(*self.target(name))
        self.keeps = {}

    def parameters(self) -> list[tuple[str, Tensor, Tensor]]:
        """(name, dense, indices of the shard) of each parameter."""
        rows = []
        for name, indices in self.indices.items():
            suffix = "_orig" if name in self.keeps else ""
            rows.append((name, self.dense.get_parameter(name + suffix), indices))
        return rows

    def my_rows(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.num_parts)[self.part]

    def compare_outputs(self, x: Tensor, when: str) -> None:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                out, expected = self.run(self.my_rows(x)), self.my_rows(self.dense(x))
                self.close(out, expected, f"{when}: outputs")

    def compare_gradients(self, when: str) -> None:
        for name, dense, indices in self.parameters():
            gradient = wrappings.gradient(self.model, name, self.indices)
            self.close(
                gradient, wrappings.my_part(dense.grad, indices), f"{when}: gradient of {name}"
            )
            if name in self.keeps and gradient[~wrappings.my_part(self.keeps[name], indices)].any():
                self.wrong.append(f"{when}: pruned elements of {name} have a gradient")

    def compare_values(self, when: str) -> None:
        held_keeps = {name: (*self.target(name), keep) for name, keep in self.keeps.items()}
        for name, (module, parameter, keep) in held_keeps.items():
            held = wrappings.local(getattr(module, parameter + "_mask"))
            differences = int((held != wrappings.my_part(keep, self.indices[name])).sum())
            self.num_mask_differences += differences
            if differences:
                self.wrong.append(f"{when}: {differences} elements of the mask of {name}")
        for name, dense, indices in self.parameters():
            held = wrappings.shard(self.model, name, self.indices)
            holds_zeros = name in self.keeps and wrappings.is_sharded(self.wrapping, name)
            if holds_zeros:
                dense.data.mul_(self.keeps[name])
            expected = wrappings.my_part(dense.detach(), indices)
            if held.numel():
                largest = float((held - expected).abs().max())
                self.largest_difference = max(self.largest_difference, largest)
            self.close(held, expected, f"{when}: {name}")
            if holds_zeros:
                keep = wrappings.my_part(self.keeps[name], indices)
                if bool(held[~keep].any()):
                    self.wrong.append(f"{when}: {name} is not zero where it is pruned")

    def close(self, actual: Tensor, expected: Tensor, when: str) -> None:
        if actual.shape != expected.shape:
            self.wrong.append(f"{when}: shape {list(actual.shape)}, not {list(expected.shape)}")
        elif not torch.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE):
            self.wrong.append(f"{when}: off by {(actual - expected).abs().max():.3g}")


def train(pair: Pair, optimizer: str, plan: dict[str, Any]) -> Pair:
    """Train both models for NUM_STEPS steps, comparing everything in each.

    Args:
        plan: "amounts": {step: amount} to prune before a step; and what else happens:
            "optimizer_last" (made after the first pruning), "evaluate" (in between),
            "inference" (pruned in inference mode), "remove_at" a step, "micro_batches" of a
            step, "clip" the gradients to a norm.
    """
    kind, options = OPTIMIZERS[optimizer]
    sizes = pair.dense.l1.in_features, pair.dense.l3.out_features
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(NUM_STEPS, 24, sizes[0], generator=generator)
    ys = torch.randn(NUM_STEPS, 24, sizes[1], generator=generator)
    optimizers = []

    def make_optimizers() -> None:
        if not optimizers:
            optimizers.extend(kind(m.parameters(), **options) for m in (pair.model, pair.dense))

    if not plan.get("optimizer_last"):
        make_optimizers()
    for step, (x, y) in enumerate(zip(xs, ys, strict=True)):
        when = f"step {step}"
        if plan.get("evaluate"):
            pair.compare_outputs(x, f"{when}, evaluated")
        if step == plan.get("remove_at"):
            pair.remove()
            pair.compare_values(f"{when}, removed")
        if step in plan["amounts"]:
            pair.prune(plan["amounts"][step], plan.get("inference", False))
            pair.compare_values(f"{when}, pruned")
            if plan.get("evaluate"):
                pair.compare_outputs(x, f"{when}, pruned and evaluated")
        make_optimizers()
        backward(pair, x, y, when, plan.get("micro_batches", 1))
        pair.compare_gradients(when)
        if "clip" in plan and pair.can_clip:
            norms = [clip(each, plan["clip"]) for each in (pair.model, pair.dense)]
            norm = norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0]
            pair.close(norm, norms[1], f"{when}: norm of the gradients")
            pair.compare_gradients(f"{when}, clipped")
        for each in optimizers:
            each.step()
            each.zero_grad()
        pair.compare_values(f"{when}, updated")
    return pair


def clip(model: nn.Module, largest: float) -> Tensor:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(largest)
    return nn.utils.clip_grad_norm_(model.parameters(), largest)


def backward(pair: Pair, x: Tensor, y: Tensor, when: str, num: int) -> None:
    """Gradients of the mean loss of a batch, in ``num`` micro-batches."""
    for which, (x_part, y_part) in enumerate(zip(x.chunk(num), y.chunk(num), strict=True)):
        with wrappings.synchronised(pair.model, which == num - 1):
            out, expected = pair.run(pair.my_rows(x_part)), pair.dense(x_part)
            pair.close(out, pair.my_rows(expected), f"{when}: outputs")
            loss, loss_dense = F.mse_loss(out, pair.my_rows(y_part)), F.mse_loss(expected, y_part)
            (loss / num).backward()
            (loss_dense / num).backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        pair.close(mean / dist.get_world_size(), loss_dense.detach(), f"{when}: loss")
