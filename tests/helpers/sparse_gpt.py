"""A plain SparseGPT, as its paper has it (arXiv 2301.00774): for comparisons."""

import torch
from torch import Tensor


def sparse_gpt(
    weight: Tensor,
    gram: Tensor,
    sparsity: float | None,
    *,
    damping: float = 0.01,
    width: int = 128,
    pattern: tuple[int, int] | None = None,
) -> Tensor:
    """The pruned weight, with all kept elements moved; zeros where it is pruned.

    Args:
        weight: [outputs, inputs].
        gram: [inputs, inputs], without damping.
        sparsity: of each block of columns; None with a pattern.
        damping: in units of the mean of the diagonal.
        width: columns of a block, whose mask is chosen at once.
        pattern: (N, M): N of M neighbours are kept.
    """
    new, gram = weight.float().clone(), gram.float().clone()
    unseen = gram.diagonal() == 0
    gram.diagonal()[unseen] = 1
    new[:, unseen] = 0
    gram.diagonal().add_(damping * gram.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    upper = torch.linalg.cholesky(inverse, upper=True)
    for first in range(0, new.shape[1], width):
        last = min(first + width, new.shape[1])
        block, errors = new[:, first:last].clone(), torch.zeros_like(new[:, first:last])
        inner = upper[first:last, first:last]
        prune = torch.zeros_like(block, dtype=torch.bool)
        if pattern is None:
            scores = block.square() / inner.diagonal().square()
            threshold = scores.flatten().kthvalue(max(1, int(scores.numel() * sparsity))).values
            prune = scores <= threshold
        for column in range(last - first):
            if pattern is not None and column % pattern[1] == 0:
                here = slice(column, column + pattern[1])
                scores = block[:, here].square() / inner.diagonal()[here].square()
                lowest = scores.topk(pattern[1] - pattern[0], dim=1, largest=False).indices
                prune[:, here] = prune[:, here].scatter(1, lowest, True)
            kept = block[:, column].masked_fill(prune[:, column], 0)
            error = (block[:, column] - kept) / inner[column, column]
            block[:, column:] -= error.unsqueeze(1) * inner[column, column:]
            block[:, column] = kept
            errors[:, column] = error
        new[:, first:last] = block
        new[:, last:] -= errors @ upper[first:last, last:]
    return new.to(weight.dtype)
