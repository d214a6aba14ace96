"""Un-averaged gradients under FSDP1; like fsdp1, this file knows its private fields."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from distprune.torch_private.fsdp1 import FlatPiece, local_slice
from distprune.torch_private.gradient_source import GradientSource, Receive


class FlatSource(GradientSource):
    """A flat parameter, for all pieces of it: see gradient_source.[Note: hooks on leaves].

    A rank's piece of its gradient has the runs of its parameters where :attr:`FlatPiece.span` says.

    Args:
        piece: any parameter of the flat one.
    """

    def __init__(self, piece: FlatPiece) -> None:
        self._flat_handle = piece.handle
        self._hook_handle: RemovableHandle | None = None
        shards, *replicas = piece.groups
        self.shard_group = shards
        self.replica_groups = tuple(replicas)

    def attach(self, receive: Receive) -> None:
        def hook(gradient: Tensor) -> None:
            with torch.no_grad():
                receive(gradient)

        flat_param: Tensor = self._flat_handle.flat_param
        self._hook_handle = flat_param.register_hook(hook)  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        if self._hook_handle is not None:
            self._hook_handle.remove()
            self._hook_handle = None

    def pieces(self, gradient: Tensor) -> Tensor:
        num_ranks = self._flat_handle.process_group.size()
        pieces = gradient.new_empty(
            (num_ranks, local_slice(self._flat_handle).numel()), dtype=torch.float32
        )
        flat = pieces.view(-1)
        flat[: gradient.numel()].copy_(gradient.reshape(-1))
        flat[gradient.numel() :].zero_()
        return pieces
