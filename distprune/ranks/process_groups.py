"""The ranks of a call: a communicator over a process group, a device mesh, or one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distprune.ranks.collectives import Communicator

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def world(group: dist.ProcessGroup | None = None) -> Communicator:
    """The ranks of ``group``, every rank by default; a single process without one.

    Raises:
        ValueError: this rank is not a member of ``group``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Communicator(())
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # is_initialized
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of group={group}; "
            "expected the call only on the ranks of the group."
        )
    return over_groups([group], dist.get_process_group_ranks(group))


def over_mesh(mesh: DeviceMesh) -> Communicator:
    """The ranks of a device mesh: reductions go over one axis after the other.

    Raises:
        ValueError: this rank is outside the mesh.
    """
    ranks = mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"rank {dist.get_rank()} is outside the mesh of the parameter ({mesh}); expected "
            "the call only on the ranks of the mesh."
        )
    return over_groups([mesh.get_group(axis) for axis in range(mesh.ndim)], ranks)


def over_groups(groups: Sequence[dist.ProcessGroup], ranks: Sequence[int] = ()) -> Communicator:
    """Ranks that several process groups join like the axes of a grid; see :func:`over_mesh`.

    Args:
        groups: this rank's group along every axis.
        ranks: all global ranks of the grid; by default they are found here.
    """
    ranks = ranks or grid(groups)
    groups = [group for group in groups if group.size() > 1]
    device = _reduction_device(groups[0]) if groups else "cpu"
    return Communicator(groups, ranks, dist.get_rank(), device)


def grid(groups: Sequence[dist.ProcessGroup]) -> list[int]:
    """The global ranks that this rank's groups join, if they are the axes of a regular grid."""
    me, offsets = dist.get_rank(), {0}
    for group in groups:
        members = dist.get_process_group_ranks(group)
        offsets = {offset + member - me for offset in offsets for member in members}
    return sorted(me + offset for offset in offsets)


def is_distributed() -> bool:
    """Whether a process group is initialised: plain modules may then be replicas."""
    return dist.is_available() and dist.is_initialized()


def _reduction_device(group: dist.ProcessGroup) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
