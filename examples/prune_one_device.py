"""One process, one GPU or the CPU: `import distprune as prune` where torch.nn.utils.prune was.

python examples/prune_one_device.py
"""

import os
from pathlib import Path

import torch
from torch import nn

import distprune as prune  # instead of: import torch.nn.utils.prune as prune


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    # Predict a byte of Python's own sources from the eight before it.
    text = torch.tensor(list(Path(os.__file__).read_bytes()), device=device)
    windows = text.unfold(0, 9, 1)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(steps: int) -> float:
        for _ in range(steps):
            batch = windows[torch.randint(len(windows), (256,), device=device)]
            loss = nn.functional.cross_entropy(model(batch[:, :8]), batch[:, 8])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    print(f"dense: loss {train(60):.3f}")
    prune.l1_unstructured(model[4], "weight", amount=0.5)  # one layer, as in torch
    # 80 % of the remaining weights of all layers together; the embedding stays dense.
    report = prune.global_unstructured(
        prune.select(model, types=nn.Linear), prune.L1Unstructured, amount=0.8
    )
    print(report)
    print(f"pruned and trained on: loss {train(60):.3f}")
    for module, name in prune.select(model, types=nn.Linear):
        prune.remove(module, name)  # an ordinary model again, with the zeros in its weights
    zeros = sum(int((layer.weight == 0).sum()) for layer in (model[2], model[4]))
    print(f"{zeros:,} weights are zero")


if __name__ == "__main__":
    main()
