"""``distprune selftest``: one rank with the device's backend; ranks that share it, over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from measuring import Table
from stage import Stage, main


def one_rank(stage: Stage) -> None:
    """On CUDA with NCCL."""
    document = selftest(stage, 1)
    expected = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}[stage.device.type]
    backend, device = (document["facts"][key] for key in ("backend", "device"))
    stage.check("the backend is the device's own", backend == expected, backend)
    stage.check("the device was tested", device.startswith(stage.device.type), device)


def two_ranks_that_share_the_device(stage: Stage) -> None:
    shared(stage, 2)


def four_ranks_that_share_the_device(stage: Stage) -> None:
    """HSDP, and FSDP2 over tensor parallelism need four."""
    shared(stage, 4)


def shared(stage: Stage, size: int) -> None:
    facts = selftest(stage, size)["facts"]
    stage.check("the backend is gloo", facts["backend"] == "gloo", facts["backend"])
    is_right = facts["device"].startswith(stage.device.type)
    stage.check("the device was tested", is_right, facts["device"])


def selftest(stage: Stage, size: int) -> dict:
    """Run all ranks; add what they found to the stage.

    Returns:
        The document that rank 0 printed.
    """
    command = [sys.executable, "-m", "distprune", "selftest", "--json", "--timeout", "40"]
    command += ["--cpu"] if stage.device.type == "cpu" else ["--share"] if size > 1 else []
    environment = dict(os.environ)
    if size > 1:
        environment |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
    ranks = []
    for rank in range(size):
        mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else None
        stdout = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=mine, stdout=stdout, text=True))
    output, _ = ranks[0].communicate()
    codes = [each.wait() for each in ranks]
    stage.check("every rank ended with code 0", codes == [0] * size, str(codes))
    document = json.loads(output)
    rows = document["wrappings"]
    for wrong in document["wrong"]:
        stage.check("everything that was tried holds", False, wrong)
    checks = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = [[name, *(row.get(check, "") for check in checks)] for name, row in rows.items()]
    stage.table(Table(f"{size} rank(s), {document['facts']['backend']}", ["", *checks], table))
    stage.check("everything that was tried holds", document["holds"])
    return document


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    main(one_rank, two_ranks_that_share_the_device, four_ranks_that_share_the_device)
