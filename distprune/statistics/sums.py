"""Sums over the tokens of an activation: of x and of x squared, in fp64, chunk by chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# Elements that are converted to fp64 at a time: what stays in the cache of a core, 1 MiB; and what
# keeps an accelerator busy, 32 MiB.
_CPU_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 22


@dataclass(frozen=True)
class Sums:
    """What one forward of a layer adds to its statistics.

    Attributes:
        num_tokens: how many there are.
        totals: fp64 [2, inputs]: the sums of x, and those of x squared.
    """

    num_tokens: int
    totals: Tensor


def sums_of_rows(rows: Tensor, keep: Tensor | None = None, num_kept: int | None = None) -> Sums:
    """Sums over the rows of the input of a linear layer.

    Args:
        rows: [tokens, features], of any real floating-point dtype. Squares are those of fp64: in
            fp16 they would overflow from 256 on.
        keep: bool [tokens]; rows that are False are left out, whatever they hold.
        num_kept: how many of them are True.

    Cost: one read; temporaries in fp64 of a chunk, 1 MiB on a CPU and 32 MiB elsewhere.
    """
    totals = torch.zeros(2, rows.shape[1], dtype=torch.float64, device=rows.device)
    for start, stop in _spans(rows.shape[0], rows.shape[1], rows.device):
        chunk = rows[start:stop].to(torch.float64, copy=True)
        if keep is not None:
            chunk.masked_fill_(~keep[start:stop].unsqueeze(1), 0)
        totals[0] += chunk.sum(0)
        totals[1] += chunk.square_().sum(0)
    if keep is None:
        return Sums(rows.shape[0], totals)
    return Sums(int(keep.sum()) if num_kept is None else num_kept, totals)


def sums_of_windows(images: Tensor, layer: nn.Conv1d | nn.Conv2d) -> Sums:
    """Sums over the columns of the unfolded input of a convolution.

    For the input channel c and the offset k in the kernel, the column is what the weight
    [:, c, k] meets: x[c, k * dilation + o * stride] of the padded input, for all positions o of
    the output. It is summed as a strided view: nothing is unfolded.

    Args:
        images: [samples, channels, *sizes].
        layer: says kernel size, stride, dilation and padding.

    Returns:
        One token per sample and position of the output; inputs in the order [channels, *kernel].

    Cost: a read per offset in the kernel; temporaries in fp64 of a chunk of samples, at least one.
    """
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    padding = _padding(layer)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded_sizes = [
        size + before + after
        for size, (before, after) in zip(images.shape[2:], padding, strict=True)
    ]
    outputs = [
        max(0, (size - reach * (width - 1) - 1) // step + 1)
        for size, width, reach, step in zip(padded_sizes, kernel, dilation, stride, strict=True)
    ]
    channels = images.shape[1]
    totals = torch.zeros(2, channels, *kernel, dtype=torch.float64, device=images.device)
    flat_padding = [size for pair in reversed(padding) for size in pair]
    per_sample = channels * torch.Size(padded_sizes).numel()
    dims = [0, *range(2, images.ndim)]
    for start, stop in _spans(images.shape[0], per_sample, images.device):
        chunk = functional.pad(images[start:stop].to(torch.float64), flat_padding, mode=mode)
        for total, terms in zip(totals, (chunk, chunk.square()), strict=True):
            for offset in itertools.product(*map(range, kernel)):
                # What this offset of the kernel meets, for all positions of the output.
                starts = [at * reach for at, reach in zip(offset, dilation, strict=True)]
                windows = [
                    slice(start, start + step * count, step)
                    for start, step, count in zip(starts, stride, outputs, strict=True)
                ]
                whole = slice(None)
                met, place = (whole, whole, *windows), (whole, *offset)
                total[place] += terms[met].sum(dims)
    num_tokens = images.shape[0] * torch.Size(outputs).numel()
    return Sums(num_tokens, totals.view(2, -1))


def _padding(layer: nn.Conv1d | nn.Conv2d) -> list[tuple[int, int]]:
    """How many elements are put before and after each dimension of size."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        missing = [
            reach * (width - 1)
            for width, reach in zip(layer.kernel_size, layer.dilation, strict=True)
        ]
        return [(total // 2, total - total // 2) for total in missing]
    return [(int(size), int(size)) for size in layer.padding]


def _spans(length: int, size: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Spans of a dimension; with ``size`` elements in each place they are chunks."""
    chunk = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // max(1, size))
    for start in range(0, length, step):
        yield start, min(start + step, length)
