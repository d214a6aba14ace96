"""The oracle for checkpoints: expected masks and weights, computed in memory by reference.py."""

import math

import torch

from distprune.base.memory import hash_keys
from distprune.base.selecting import natural_key
from helpers.reference import normalized, num_to_prune, prune, prune_bounded


def masks(
    tensors,
    names,
    *,
    sparsity=None,
    scope="global",
    pattern=None,
    seed=None,
    limits=None,
    normalize=None,
):
    """Masks by name, True = keep, of the selected tensors of a checkpoint in memory.

    It takes matrices, and convolutions for patterns along their inputs.
    """
    names = sorted_names(names)
    scores = _scores(tensors, names, seed)
    if normalize is not None:
        scores = {n: normalized(each, normalize) for n, each in scores.items()}
    if pattern is not None:
        kept, group = map(int, pattern.split(":"))
        return {n: _by_pattern(scores[n], kept, group) for n in names}
    if scope == "layer":
        return {n: prune([scores[n]], float(sparsity))[0] for n in names}
    if scope == "row":
        return {
            n: torch.stack([prune([row], float(sparsity))[0] for row in scores[n].flatten(1)])
            .reshape(scores[n].shape)
            for n in names
        }  # fmt: skip
    in_order = [scores[n] for n in names]
    if limits is not None:
        total = sum(each.numel() for each in in_order)
        low, high = ([limit] * len(names) for limit in limits)
        keeps = prune_bounded(in_order, num_to_prune(float(sparsity), total), low, high)
    else:
        keeps = prune(in_order, float(sparsity))
    return dict(zip(names, keeps, strict=True))


def sorted_names(names):
    """Sort names in the order of ranking."""
    return sorted(names, key=natural_key)


def _scores(tensors, names, seed):
    if seed is None:
        return {n: tensors[n] for n in names}
    drawn = torch.Generator().manual_seed(seed)
    seed = int(torch.randint(2**62, (1,), generator=drawn))
    scores, offset = {}, 0
    for n in names:
        # Ranks, not hashes: float64 does not hold 63 bits.
        numel = tensors[n].numel()
        scores[n] = hash_keys(torch.arange(offset, offset + numel), seed).reshape(tensors[n].shape)
        offset += numel
    ranks = torch.cat([scores[n].flatten() for n in names]).argsort().argsort()
    for n in names:
        scores[n], ranks = (
            ranks[: scores[n].numel()].reshape(scores[n].shape),
            ranks[scores[n].numel() :],
        )
    return scores


def _by_pattern(scores, kept, group):
    last = scores.movedim(1, -1) if scores.ndim > 2 else scores
    groups = last.reshape(-1, group)
    keep = torch.stack([prune([g], group - kept)[0] for g in groups]).reshape(last.shape)
    return keep.movedim(-1, 1) if scores.ndim > 2 else keep


def check(source, folder, expected, load):
    """Compare the weights, masks and counts in a folder with the expected ones, bit for bit."""
    before, after = load(source), load(folder)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        wanted = tensor.clone()
        if name in expected:
            wanted[~expected[name]] = 0  # +0
        same = wanted.reshape(-1).view(torch.uint8).equal(after[name].reshape(-1).view(torch.uint8))
        assert same, name
    stored = load(folder / "distprune", "masks.safetensors")
    assert stored.keys() == expected.keys()
    for name, keep in expected.items():
        assert stored[name].numel() == math.ceil(keep.numel() / 8)
        bits = stored[name].unsqueeze(1) >> torch.arange(8) & 1
        assert bits.flatten()[: keep.numel()].bool().equal(keep.flatten()), name
