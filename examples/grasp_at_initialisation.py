"""Prune 90 % of a model before it is trained: by GraSP, and at random for comparison.

python examples/grasp_at_initialisation.py

GraSP keeps the weights without which the norm of the gradient would fall most: the score of a
weight w is w * (H g), with the gradient g and the Hessian H, and the lowest scores are pruned.
H g is a second derivative, so the model is a plain one. Wang et al., ICLR 2020, arXiv 2002.07376.
"""

import torch
from torch import nn

import distprune as prune


def grasp(targets: list[prune.NamedParameter], loss: torch.Tensor) -> dict:
    weights = [module.get_parameter(name) for module, name in targets]
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    product = sum((gradient.detach() * gradient).sum() for gradient in gradients)
    hessian_products = torch.autograd.grad(product, weights)
    scores = ((w * hg).detach() for w, hg in zip(weights, hessian_products, strict=True))
    return dict(zip(targets, scores, strict=True))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 20, generator=generator)
    y = torch.randint(10, (256,), generator=generator)
    for name in ("grasp", "random"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        model.append(nn.Linear(64, 10))
        targets = prune.select(model)
        if name == "grasp":
            scores = grasp(targets, nn.functional.cross_entropy(model(x), y))
            report = prune.global_unstructured(targets, prune.LowestScore, scores, amount=0.9)
        else:
            report = prune.global_unstructured(targets, prune.RandomUnstructured, amount=0.9)
        nn.functional.cross_entropy(model(x), y).backward()
        norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
        print(report)
        print(f"{name}: norm of the gradient {norm:.4f}")


if __name__ == "__main__":
    main()
