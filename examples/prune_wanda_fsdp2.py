"""Prune a trained model by Wanda under FSDP2: by its weights, and its inputs on calibration text.

launch/torchrun.sh examples/prune_wanda_fsdp2.py
launch/torchrun.sh examples/prune_wanda_fsdp2.py magnitude     by its weights alone, to compare
"""

import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune import statistics

STEPS, BATCH, CALIBRATION_BATCHES = 200, 512, 8


def batch_of(step: int, windows: torch.Tensor) -> torch.Tensor:
    """This rank's part of a batch that only the step decides."""
    picks = torch.randint(len(windows), (BATCH,), generator=torch.Generator().manual_seed(step))
    return windows[picks.chunk(dist.get_world_size())[dist.get_rank()]]


def loss_on(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    # Predict a byte of Python's own help texts from the eight before it.
    text = torch.tensor(list("".join(topics.values()).encode()))
    train, held_out = text[:-40_000].unfold(0, 9, 1), text[-40_000:].unfold(0, 9, 5)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)
    )
    for layer in (model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        loss_on(model, batch_of(step, train)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss_dense = loss_on(model, held_out).item()

    targets = prune.select(model, types=nn.Linear)
    scores = None
    if "magnitude" not in sys.argv:
        inputs = statistics.ActivationStatistics(targets)
        with inputs.collecting():
            # Each rank reads its own text, of the kind that the model was trained on.
            for step in range(STEPS, STEPS + CALIBRATION_BATCHES):
                model(batch_of(step, train)[:, :8])
        # |weight| * the norm of its input, over the text of all ranks. These scores are computed
        # while they are ranked: what is in memory, and on the wire, is a number per input.
        scores = inputs.wanda()
    # Inputs have another scale in every layer: "rms" makes the scores of layers comparable.
    report = prune.global_unstructured(
        targets, prune.L1Unstructured, scores, amount=0.8, normalize="rms"
    )
    for module, name in targets:
        prune.remove(module, name)  # an ordinary model again, with zeros in its weights

    with torch.no_grad():
        loss_pruned = loss_on(model, held_out).item()
    if dist.get_rank() == 0:
        print(f"{report}\n\nheld-out loss: {loss_dense:.3f} dense, {loss_pruned:.3f} pruned")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
