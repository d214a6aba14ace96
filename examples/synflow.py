"""Prune 99 % of a model without any data, in 100 rounds: by SynFlow, and by magnitude.

python examples/synflow.py

The score of a weight w is |w * dR/dw|, where R is the sum of the outputs for an input of ones, of
the model with the absolute values of its parameters. No layer loses all of its weights before it
has to, as the smallest one does by magnitude. Tanaka et al., NeurIPS 2020, arXiv 2006.05467.
"""

import torch
from torch import nn

import distprune as prune

ROUNDS, SPARSITY = 100, 0.99


def synflow(model: nn.Module, targets: list[prune.NamedParameter], ones: torch.Tensor) -> dict:
    values = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    with torch.no_grad():
        for parameter in values:
            parameter.abs_()
    model(ones).sum().backward()
    weights = [module.get_parameter(f"{name}_orig") for module, name in targets]
    scores = {p: (w * w.grad).detach().abs() for p, w in zip(targets, weights, strict=True)}
    with torch.no_grad():
        for parameter, value in values.items():
            parameter.copy_(value)
    model.zero_grad()
    return scores


def main() -> None:
    for name in ("synflow", "magnitude"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64))
        nn.init.normal_(model[2].weight, std=1e-3)
        targets = prune.select(model)
        total = prune.global_unstructured(targets, prune.L1Unstructured, amount=0).num_elements
        for number in range(ROUNDS) if name == "synflow" else [ROUNDS - 1]:
            scores = synflow(model, targets, torch.ones(1, 64)) if name == "synflow" else None
            pruned = sum(int((module.weight_mask == 0).sum()) for module, _ in targets)
            share = 1 - (1 - SPARSITY) ** ((number + 1) / ROUNDS)
            amount = round(share * total) - pruned
            report = prune.global_unstructured(targets, prune.L1Unstructured, scores, amount=amount)
        print(report)
        left = [int(module.weight_mask.sum()) for module, _ in targets]
        print(f"{name}: {left} weights left")


if __name__ == "__main__":
    main()
