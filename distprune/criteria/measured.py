"""Criteria that evaluate the model at other weights than its own, by code of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from distprune._common.process_groups import world
from distprune.criteria.base import Criterion
from distprune.masks.values import KeptModel, kept_model
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MeasuredCriterion(Criterion):
    """Base of criteria that run forwards and backwards themselves, at other weights.

    ``measure`` takes the place of ``update``. While it runs, parameters have other values
    (masks/values.py); afterwards the model is, bit for bit, what it was: weights, masks, buffers,
    modes of its modules. It has no gradients then.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them, all of them of ``model``.
        model: the whole model, wrapped: what the caller's code calls.
        group: the ranks that take part; every rank by default.

    Raises:
        NotImplementedError: parameters in half precision, or that a wrapper gathers in half
            precision: the measurement would be mostly rounding errors.
        Exception: as :class:`Criterion`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        model: nn.Module,
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; expected the wrapped model.")
        super().__init__(parameters, group=group)
        self._model = model
        reader = ShardReader()
        for parameter, shard in zip(self._tracked, self._read(reader), strict=True):
            managed = reader.managed(parameter.module, parameter.name)
            is_rounded = managed is not None and managed.gathers_in_other_dtype
            if is_rounded or shard.values.dtype.itemsize < 4:
                raise NotImplementedError(
                    f"{shard.name}: {type(self).__name__} needs a model that computes in float32 "
                    f"or float64, and this parameter is {shard.values.dtype}"
                    f"{', gathered in another dtype' if is_rounded else ''}; expected "
                    "model.float() for the time of the measurement, and wrappers without mixed "
                    "precision."
                )

    def update(self, weight: float = 1.0) -> NoReturn:
        """Not available: ``measure`` takes its place."""
        raise NotImplementedError(_NO_UPDATE.format(type(self).__name__))

    @contextmanager
    def batch(self, weight: float = 1.0) -> Iterator[None]:
        """Not available: ``measure`` takes its place."""
        self.update(weight)
        yield

    def _accumulate(
        self, position: int, shard: LocalShard, gradient: Tensor, weight: float
    ) -> NoReturn:
        raise AssertionError("update() is not available, and nothing else accumulates units")

    @contextmanager
    def _measuring(self) -> Iterator[KeptModel]:
        """Run a block that measures: without gradients before, and with none left behind."""
        world(self._group).run(self._check_no_gradients)
        with kept_model(self._model) as kept:
            try:
                yield kept
            finally:
                self._model.zero_grad(set_to_none=True)

    def _check_no_gradients(self) -> None:
        with_gradient = [n for n, p in self._model.named_parameters() if p.grad is not None]
        if with_gradient:
            raise RuntimeError(
                f"{with_gradient[0]} has a gradient, which a measurement by {type(self).__name__} "
                "would overwrite; expected none. Call model.zero_grad() after the optimizer's step."
            )

    def _measured_gradients(
        self, kept: KeptModel, run: Callable[[], Any]
    ) -> tuple[list[LocalShard], list[Tensor]]:
        """This rank's part of every gradient that the caller's code leaves; not copies.

        Every run begins with the same buffers, the same random state and no gradients.
        """
        kept.restore_buffers()
        self._model.zero_grad(set_to_none=True)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
        kind = "cuda" if accelerator is None else accelerator.type
        communicator = world(self._group)
        with (
            communicator.raising_everywhere(),
            torch.random.fork_rng(devices, device_type=kind),
            torch.enable_grad(),
        ):
            run()
        return communicator.run(self._checked_gradients)

    def _checked_gradients(self) -> tuple[list[LocalShard], list[Tensor]]:
        with torch.no_grad():
            reader = ShardReader(world(self._group).index, world(self._group).size)
            shards = self._read(reader)
            gradients = self._gradients(reader, shards)
            for shard, gradient in zip(shards, gradients, strict=True):
                if not bool(gradient.isfinite().all()):
                    raise ValueError(f"{shard.name} {self._not_finite}")
        return shards, gradients

    _not_finite = (
        "has a gradient that is not finite; expected finite ones. A gradient scaler is not needed "
        "here."
    )


_NO_UPDATE = (
    "{} has no unit to add: it runs the forwards and backwards itself, because it needs gradients "
    "at other weights; expected measure(...), and then scores()."
)
