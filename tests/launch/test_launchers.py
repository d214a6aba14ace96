"""The launchers start what they say, on one machine and on several, or stop and say why not."""

import json
import os
import re
import shlex
import sys

import pytest
from shell import ROOT, run, start

from helpers.forked_scripts import held_port, output_of

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import distprune

dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
found = [int(os.environ[name]) for name in names] + [dist.get_world_size(), int(total)]
with open(f"{sys.argv[1]}/rank{dist.get_rank()}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_torchrun_on_two_machines(tmp_path):
    """Two agents that meet at a rendezvous, as on two machines; here both are this one."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with held_port() as port:
        settings = {"NNODES": 2, "NPROC": 1, "RDZV_ENDPOINT": f"localhost:{port}"}
        agents = [start("launch/torchrun.sh", script, tmp_path, **settings) for _ in range(2)]
        try:
            outputs = [agent.communicate(timeout=100)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    files = sorted(tmp_path.glob("*.json"))
    found = [json.loads(file.read_text()) for file in files]
    assert sorted(found) == [[0, 0, 1, 2, 1], [1, 0, 1, 2, 1]], outputs


def test_torchrun_on_several_machines_needs_a_place_to_meet():
    status, output = run("launch/torchrun.sh", "script.py", NNODES=2)
    assert status == 2
    assert "NNODES=2, but RDZV_ENDPOINT is not set" in output


JOB = """
from common import join, leave
job = join()
job.say(f"{job.num_ranks} ranks")
leave()
"""


def started_by(command, script):
    """What a script printed under a command with variables before it."""
    words = shlex.split(command)
    variables = dict(word.split("=") for word in words if re.fullmatch("[A-Z_]+=.*", word))
    arguments = words[len(variables) :]
    assert arguments[:2] == ["accelerate", "launch"]
    drop = ("ACCELERATE_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port"]
    with held_port() as port:
        clean |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'launch'}", "OMP_NUM_THREADS": "1"}
        return output_of(*launch, port, *arguments[2:], script, env=clean | variables)


@pytest.mark.slow
@pytest.mark.thorough
def test_accelerate_that_starts_fewer_than_it_was_asked_for(tmp_path):
    """The warning says so, and what it advises starts as many as were asked for."""
    script = tmp_path / "script.py"
    script.write_text(JOB)
    printed = started_by("accelerate launch --cpu --num_processes 2 --num_machines 1", script)
    assert "1 ranks" in printed and "Warning: this is the only rank" in printed
    advised = re.search(r"on the CPU: (.*) N SCRIPT, or torchrun", printed)[1]
    printed = started_by(f"{advised} 2", script)
    assert "2 ranks" in printed and "Warning" not in printed


@pytest.mark.slow
@pytest.mark.thorough
def test_accelerate_without_the_fsdp_that_was_asked_for():
    example = ROOT / "examples" / "prune_accelerate.py"
    status, output = run("launch/accelerate.sh", example, CPU=1, CONFIG="fsdp2")
    assert status != 0
    assert "RuntimeError: fsdp2 is what accelerate was asked for, and the model is ddp" in output
    assert "done" not in output
