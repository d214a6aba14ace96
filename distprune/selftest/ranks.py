"""The ranks of a self-test: how they meet, and how they exchange results.

Results travel through the store at which the ranks met, and not through the backend under
test: a rank that failed in the middle of a collective can still report it.
"""

from __future__ import annotations

import contextlib
import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_MARGIN = 10.0  # seconds that a rank gets to report an error of the backend


class LostError(RuntimeError):
    """Ranks did not meet, or did not answer in time."""


class Ranks:
    """The ranks that torchrun started, or this process alone.

    Args:
        timeout: seconds in which each step has to end.
        cpu: use the CPU even if there are accelerators.
        share: use gloo, on accelerators too, so that several ranks may have one of them.
        meeting: (store, rank, number of ranks), if the caller has arranged it.

    Raises:
        LostError: the ranks do not find each other, or would use different devices.

    Attributes:
        rank, size: this rank, and the number of ranks.
        device: the device of this rank.
        backend: of torch.distributed.
        notes: why an accelerator of this machine is not used.
    """

    def __init__(
        self,
        timeout: float,
        *,
        cpu: bool = False,
        share: bool = False,
        meeting: tuple[Store, int, int] | None = None,
    ) -> None:
        self.timeout = timeout
        self.notes: list[str] = []
        self._num_shared = 0
        patience = timedelta(seconds=timeout + _MARGIN)
        try:
            self._store, self.rank, self.size = meeting or _meet(patience)
            self._store.set_timeout(patience)
            self.device, self.backend = self._choose_device(cpu, share)
            devices = self.share(self.device.type)
            if len(set(devices)) > 1:
                raise LostError(
                    f"the ranks would use different devices ({', '.join(sorted(set(devices)))}); "
                    "expected one kind of device on every machine. Pass --cpu to use none."
                )
            dist.init_process_group(
                self.backend,
                store=PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout),
                device_id=None if self.backend == "gloo" else self.device,
            )
        except (ValueError, RuntimeError) as error:
            if isinstance(error, LostError):
                raise
            raise LostError(f"the ranks did not meet: {error}") from error

    def share(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of ranks; the same on every rank.

        Args:
            value: a value that JSON can represent.

        Raises:
            LostError: names the ranks that did not answer in time; on every other rank.
        """
        self._num_shared += 1
        answers: list[Any]
        key = f"shared{self._num_shared}"
        if self.rank:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{key}/{self.rank}", json.dumps(value))
            try:
                answers = json.loads(self._store.get(key))
            except RuntimeError as error:
                raise LostError(f"rank 0 did not answer within {self.timeout:.0f} s") from error
        else:
            answers = [value, *(self._answer(f"{key}/{r}") for r in range(1, self.size))]
            self._store.set(key, json.dumps(answers))
        lost = [rank for rank, answer in enumerate(answers) if answer == _NO_ANSWER]
        if lost:
            ranks = "ranks " + ", ".join(map(str, lost)) if len(lost) > 1 else f"rank {lost[0]}"
            raise LostError(f"{ranks} did not answer within {self.timeout:.0f} s")
        return answers

    def leave(self) -> None:
        """Destroy the process group; rank 0, which may serve the store, goes last."""
        with contextlib.suppress(LostError):
            self.share(None)
        if not self.rank:
            for rank in range(1, self.size):
                with contextlib.suppress(RuntimeError):
                    self._store.get(f"left/{rank}")
        dist.destroy_process_group()
        if self.rank:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"left/{self.rank}", "")

    def _answer(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key))
        except RuntimeError:
            self._store.set_timeout(timedelta(seconds=1))  # the other ranks had the same time
            return _NO_ANSWER

    def _choose_device(self, cpu: bool, share: bool) -> tuple[torch.device, str]:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or cpu:
            return torch.device("cpu"), "gloo"
        backend = dist.get_default_backend_for_device(accelerator.type)
        number = torch.accelerator.device_count()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        if share:
            index = int(os.environ.get("LOCAL_RANK", self.rank)) % number
            torch.accelerator.set_device_index(index)
            return torch.device(accelerator.type, index), "gloo"
        if backend == "gloo" or not dist.is_backend_available(backend):
            self.notes.append(f"no backend for {accelerator.type}: the CPU is tested")
        elif local_size > number:
            self.notes.append(
                f"{local_size} ranks would share {number} {accelerator.type} devices: the CPU is "
                "tested. With --share they have them in common, over gloo"
            )
        else:
            index = int(os.environ.get("LOCAL_RANK", 0))
            torch.accelerator.set_device_index(index)
            return torch.device(accelerator.type, index), backend
        return torch.device("cpu"), "gloo"


def _meet(patience: timedelta) -> tuple[Store, int, int]:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=patience))
        return store, rank, size
    return HashStore(), 0, 1


_NO_ANSWER = "no answer"
