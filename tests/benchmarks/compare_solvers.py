"""Ways to solve the least squares of kept weights, side by side: error that is left, and time.

    python tests/benchmarks/compare_solvers.py MODEL TEXT

MODEL is the folder of a language model. Some matrices are pruned by Wanda, by rows, and solved
in each way with the Gram matrices of 16 windows of TEXT. What came of it is in TRIED.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import distprune as prune
from distprune import language_models
from distprune.reconstruction.solving import least_squares
from distprune.statistics import GramMatrices
from distprune.statistics.gram import with_damping

Solver = Callable[[Tensor, Tensor, Tensor], Tensor]


def admm(iterations: int, penalty: float) -> Solver:
    """Boza, arXiv 2401.02938: one factorisation, two products with its inverse's columns a step."""

    def solve(weights: Tensor, keep: Tensor, gram: Tensor) -> Tensor:
        # In units of its diagonal, as the paper has it.
        scale = gram.diagonal().sqrt()
        unit = gram / scale / scale.unsqueeze(1)
        rho = penalty * unit.diagonal().mean()
        inverse = torch.linalg.inv(unit + rho * torch.eye(len(gram), dtype=gram.dtype))
        dense = weights * scale
        target = dense @ unit
        sparse, dual = dense * keep, torch.zeros_like(dense)
        for _ in range(iterations):
            free = (target + rho * (sparse - dual)) @ inverse
            sparse = (free + dual) * keep
            dual += free - sparse
        return sparse / scale

    return solve


def elimination(weights: Tensor, keep: Tensor, gram: Tensor) -> Tensor:
    """Each row on its own, exactly."""
    new = torch.zeros_like(weights)
    for row, kept in enumerate(keep.bool()):
        support = kept.nonzero()[:, 0]
        right = gram[support] @ weights[row]
        factor = torch.linalg.cholesky(gram[support][:, support])
        new[row, support] = torch.cholesky_solve(right.unsqueeze(1), factor)[:, 0]
    return new


def in_order(weights: Tensor, keep: Tensor, gram: Tensor) -> Tensor:
    """SparseGPT's sweep over the columns, with a mask that is given."""
    upper = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True)
    new = weights.clone()
    for column in range(len(gram)):
        error = new[:, column] * (1 - keep[:, column]) / upper[column, column]
        new[:, column:] -= error.unsqueeze(1) * upper[column, column:]
    return new * keep


SOLVERS: dict[str, Solver] = {
    **{
        f"conjugate gradients, {steps} steps": lambda w, k, g, steps=steps: (
            least_squares(w, k, g, steps=steps).weights
        )
        for steps in (5, 10, 15, 20, 40)
    },
    **{
        f"ADMM, {steps} steps, penalty {penalty}": admm(steps, penalty)
        for steps in (10, 20, 40)
        for penalty in (0.1, 1.0)
    },
    "SparseGPT's sweep": in_order,
    "elimination, row by row": elimination,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--layers", nargs="+", default=["*.layers.9.*"], metavar="PATTERN")
    parser.add_argument("--rows", type=int, default=256, help="of each matrix")
    parsed = parser.parse_args()
    model = language_models.load_sharded(parsed.model, dtype=torch.float32).eval()
    tokenizer = language_models.load_tokenizer(parsed.model)
    windows = language_models.read_windows(tokenizer, (parsed.text,), 256, limit=16)
    parameters = prune.select(model, include=parsed.layers)
    grams = GramMatrices(parameters)
    language_models.calibrate(model, windows, grams, batch_size=4)
    print(f"{'':32} {'sparsity':>8}  {'error that is left':>18}  {'time':>8}")
    for amount in (0.5, 0.7):
        scores = grams.wanda()
        cases = []
        for pair in parameters:
            gram = grams.matrix(*pair).double()
            weights = getattr(*pair).detach()[: parsed.rows].double()
            ranked = weights.abs() * scores[pair].terms[0][0].double()
            threshold = ranked.quantile(amount, dim=1, keepdim=True)
            cases.append((weights, (ranked > threshold).double(), gram))
        for name, solve in SOLVERS.items():
            left = seconds = 0.0
            for weights, keep, gram in cases:
                damped, _ = with_damping(gram, 0.01, torch.float64)
                began = time.perf_counter()
                new = solve(weights, keep, damped)
                seconds += time.perf_counter() - began
                left += _error(weights - new, gram) / _error(weights - weights * keep, gram)
            print(f"{name:32} {amount:8.0%}  {left / len(cases):18.4%}  {seconds:6.2f} s")


def _error(difference: Tensor, gram: Tensor) -> float:
    return float(((difference @ gram) * difference).sum())


if __name__ == "__main__":
    main()
