"""Tensors that are hard to rank, cut into the shards of virtual ranks."""

import math

import torch

from distprune.ranking.chunks import Part
from distprune.ranking.scores import TensorScores
from distprune.shards.geometry import Split, dim_coordinates, index_map


def fill(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator)
    match kind:
        case "normal":
            return normal
        case "equal":
            return torch.full(shape, 0.5)
        case "signed zeros":
            return torch.zeros(shape) * torch.sign(normal)
        case "few values":
            return (normal * 2).round()
        case "denormals":
            return normal * 1e-41
        case "infinities":
            return torch.where(normal > 0.5, -math.inf, normal)
        case "one ulp apart":
            return torch.where(normal > 0, 1.0, 1.0000001)
        case "wide":
            return torch.exp(normal * 8)
    raise ValueError(kind)


KINDS = (
    "normal", "equal", "signed zeros", "few values", "denormals", "infinities", "one ulp apart",
    "wide",
)  # fmt: skip


def layout(kind: str, shape: tuple[int, ...], size: int, rank: int):
    """(splits, replica, number of replicas) of a rank; splits is None if it holds nothing."""
    half = size // 2
    match kind:
        case "rows":
            return [Split(0, size, rank)], 0, 1
        case "columns":
            return [Split(len(shape) - 1, size, rank)], 0, 1
        case "replicated":
            return [], rank, size
        case "owned by the last":
            return [Split(0, 1, 0)] if rank == size - 1 else None, 0, 1
        case "strided" if size % 2 == 0:
            # FSDP2 over 2 tensor parallel ranks: rows cut by tp, then by dp.
            return [Split(0, 2, rank % 2), Split(0, half, rank // 2)], 0, 1
        case "hybrid" if size % 2 == 0:
            return [Split(0, 2, rank % 2)], rank // 2, half
        case "grid" if size % 2 == 0:
            last = len(shape) - 1
            return [Split(0, 2, rank % 2), Split(last, half, rank // 2)], 0, 1
    return [Split(0, size, rank)], 0, 1


LAYOUTS = ("rows", "columns", "replicated", "owned by the last", "strided", "hybrid", "grid")


def part_of(whole, live, kind, common, size, rank, name="tensor"):
    """This rank's part of a tensor, its keys, and a function that cuts it out of a mask."""
    cut = layout(kind, whole.shape, size, rank)
    splits, replica, num_replicas = cut if cut[0] is not None else ([], 0, 1)
    coordinates = dim_coordinates(whole.shape, splits)
    if cut[0] is None:
        coordinates = tuple(rows[:0] for rows in coordinates)

    def local(tensor):
        for dim, rows in enumerate(coordinates):
            tensor = tensor.narrow(dim, rows.start, len(rows))
        return tensor.reshape(-1)

    flat = local(whole)
    n = flat.numel()
    index = index_map(whole.shape, coordinates, range(whole.ndim))
    counted = range(n * replica // num_replicas, n * (replica + 1) // num_replicas)
    mask = None if live is None else local(live)
    return (Part(name, whole.numel(), index, counted, mask), TensorScores(flat), local)
