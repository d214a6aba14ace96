"""Train a model to 90 % sparsity by RigL, AC/DC, ADMM and a proximal method; and at random.

python examples/projections.py                     one process, all methods
launch/torchrun.sh examples/projections.py RigL    sharded by FSDP2, one of them

Each method is a few lines on `global_mask`, which selects exactly k elements over all ranks, and
`set_masks`, which puts masks on the model. Sharded or not, they select the same elements.
"""

import os
import sys
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import distprune as prune
from distprune import dynamic

STEPS, BATCH, EVERY = 200, 256, 20
METHODS = ("static", "RigL", "AC/DC", "ADMM", "proximal")
Pairs = Sequence[tuple[nn.Module, str]]


def acdc_phase(pairs: Pairs, k: int, optimizer: Optimizer, *, is_sparse: bool) -> None:
    """AC/DC (Peste et al., arXiv 2106.12379): sparse and dense phases in turn.

    A sparse phase begins with the k largest weights of all parameters. In a dense one all others
    start again, from zero.
    """
    if is_sparse:
        masks = prune.global_mask(pairs, k).masks
    else:
        masks = [torch.ones_like(mask) for mask in prune.get_masks(pairs)]
    prune.set_masks(pairs, masks, optimizer=optimizer)


class ADMM:
    """ELSA's projections in training (2025; ADMM: Boyd et al., 2011).

    The weights w are pulled towards z, which has k elements over all ranks: each step adds
    rho * (w - z + u) to the gradient, and every few steps z becomes the projection of w + u, and u
    grows by what is left, w - z. The hooks run inside of ``optimizer.step()``.

    Args:
        pairs: the parameters, as ``select`` lists them.
        k: elements of z.
        rho: strength of the pull.
        every: steps between two projections.
    """

    def __init__(self, pairs: Pairs, k: int, optimizer: Optimizer, rho: float, every: int) -> None:
        self.pairs, self.k, self.rho, self.every = pairs, k, rho, every
        self.weights = [getattr(*pair) for pair in pairs]
        self.num_steps = 0
        self.u = [torch.zeros_like(w) for w in self.weights]
        self.project()
        optimizer.register_step_pre_hook(lambda *_: self.pull())
        optimizer.register_step_post_hook(lambda *_: self.after_step())

    @torch.no_grad()
    def project(self) -> None:
        summed = [w.detach() + u for w, u in zip(self.weights, self.u, strict=True)]
        masks = prune.global_mask(self.pairs, self.k, scores=summed).masks
        self.z = [both * mask for both, mask in zip(summed, masks, strict=True)]
        self.u = [both - z for both, z in zip(summed, self.z, strict=True)]

    @torch.no_grad()
    def pull(self) -> None:
        for w, z, u in zip(self.weights, self.z, self.u, strict=True):
            w.grad.add_(w - z + u, alpha=self.rho)

    def after_step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            self.project()


@torch.no_grad()
def proximal_step(pairs: Pairs, k: int, *, soft: bool = False) -> None:
    """Set all but the k largest elements of all weights to zero, after a step of the optimizer.

    With ``soft`` those that are left move towards zero, too, by the threshold: the proximal map of
    the l1 norm, of the strength that leaves k elements (iterative thresholding: Blumensath and
    Davies, arXiv 0805.0510; Daubechies et al., 2004).
    """
    found = prune.global_mask(pairs, k)
    for (module, name), mask in zip(pairs, found.masks, strict=True):
        w = getattr(module, name)
        if soft and found.threshold is not None:
            w.sub_(w.sign() * found.threshold)
        w.mul_(mask)


def build_model() -> nn.Module:
    torch.manual_seed(0)  # the same first weights on every rank, every time
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)
    )
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def loss_on(model: nn.Module, windows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])


def batch_of(step: int, windows: Tensor) -> Tensor:
    """This rank's part of a batch that only the step decides."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    picks = torch.randint(len(windows), (BATCH,), generator=torch.Generator().manual_seed(step))
    return windows[picks.chunk(size)[rank]]


def train(method: str, text: Tensor) -> tuple[float, int]:
    """The held-out loss after a training, and the number of weights that are not zero."""
    windows, held_out = text[:-40_000].unfold(0, 9, 1), text[-40_000:].unfold(0, 9, 5)
    model = build_model()
    pairs = prune.select(model, types=nn.Linear)
    k = sum(pair[0].weight.numel() for pair in pairs) // 10
    if method in ("static", "RigL"):
        prune.global_unstructured(pairs, prune.RandomUnstructured, amount=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if method == "ADMM":
        admm = ADMM(pairs, k, optimizer, rho=0.03, every=EVERY // 4)
    for step in range(STEPS):
        updates = method == "RigL" and step % EVERY == EVERY - 1 and step < STEPS * 3 // 4
        with prune.dense_gradients(pairs if updates else []):
            loss_on(model, batch_of(step, windows)).backward()
            if updates:
                fraction = dynamic.cosine_fraction(step, STEPS * 3 // 4)
                dynamic.rigl_step(pairs, fraction, optimizer=optimizer)
        if not updates:
            optimizer.step()
        optimizer.zero_grad()
        phase, first = divmod(step, 2 * EVERY)
        if method == "AC/DC" and first == 2 * EVERY - 1:  # dense, sparse, ...; the last is sparse
            acdc_phase(pairs, k, optimizer, is_sparse=phase % 2 == 0 or step == STEPS - 1)
        if method == "proximal":  # fewer and fewer elements
            left = max(k, round(10 * k * (1 - step / (STEPS // 2))))
            proximal_step(pairs, left)
    if method == "ADMM":
        admm.project()
        with torch.no_grad():
            for weight, z in zip(admm.weights, admm.z, strict=True):
                weight.copy_(z)
    for pair in pairs if prune.is_pruned(model) else []:
        prune.remove(*pair)
    # Before the evaluation: after a forward without backward, FSDP2's root has whole weights.
    num_left = num_nonzero([pair[0].weight for pair in pairs])
    with torch.no_grad():
        return loss_on(model, held_out).item(), num_left


def num_nonzero(weights: Sequence[Tensor]) -> int:
    local = [w.to_local() if hasattr(w, "to_local") else w for w in weights]
    total = torch.tensor(sum(int(w.count_nonzero()) for w in local))
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    # Predict a byte of Python's own help texts from the eight before it.
    text = torch.tensor(list("".join(topics.values()).encode()))
    for method in sys.argv[1:] or METHODS:
        loss, num_left = train(method, text)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{method}: {num_left:,} weights left, held-out loss {loss:.3f} nats per byte")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
