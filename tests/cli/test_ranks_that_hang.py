"""The parent of --nproc ends, whatever its ranks do: hang, fail alone, or ignore signals."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import start

from distprune.cli import ranks as starting
from helpers.tiny_checkpoints import save_zeros, tree_digest

DEAF = """
import pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_UNBLOCK, (2, 15))
for number in (2, 15):
    signal.signal(number, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
OBEDIENT = """
import pathlib, signal, sys, time
for number in (2, 15):
    signal.signal(number, lambda number, frame: sys.exit(130 if number == 2 else 143))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (2, 15))
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


class Ranks:
    """Processes that behave as their scripts say, watched in this process."""

    def __init__(self, folder):
        self.folder, self.said, self.pids = folder, [], []

    def run(self, *scripts, then=lambda: None):
        """The exit code and the seconds; ``then`` is called once the deaf ones are deaf."""
        files = [self.folder / f"ready-{rank}" for rank in range(len(scripts))]

        def begin(rank):
            command = [sys.executable, "-c", scripts[rank], str(files[rank])]
            process = subprocess.Popen(command)
            self.pids.append(process.pid)
            return process

        def wait_and_act():
            ready = [f for f, script in zip(files, scripts, strict=True) if "touch" in script]
            while not all(file.exists() for file in ready):
                time.sleep(0.01)
            began.append(time.monotonic())
            then()

        began = []
        thread = threading.Thread(target=wait_and_act)
        thread.start()
        code = starting.Watch(self.said.append).run(begin, len(scripts))
        thread.join()
        for pid in self.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        return code, time.monotonic() - began[0]


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(starting, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(starting, "KILL_SECONDS", 0.3)
    return Ranks(tmp_path)


def me(*numbers):
    def send():
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    return send


def test_a_deaf_rank_is_killed_some_time_after_another_failed(ranks):
    wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1][:-1] + '0'): time.sleep(.01)"
    code, seconds = ranks.run(DEAF, f"{wait}\nsys.exit(3)")
    assert code == 3 and 0.7 < seconds < 20
    assert ranks.said == ["killing the process of rank 0: SIGTERM did not end it in 0 s."]


def test_a_rank_that_ends_by_sigterm_does_not_hide_the_first_failure(ranks):
    code, _ = ranks.run(OBEDIENT, "import sys; sys.exit(4)")
    assert code == 4 and ranks.said == []


def test_ranks_that_only_notice_a_failure_do_not_hide_its_code(ranks):
    assert ranks.run("raise SystemExit(5)", "raise SystemExit(3)")[0] == 3
    assert ranks.run("raise SystemExit(5)", "raise SystemExit(5)")[0] == 5
    assert ranks.run("", "")[0] == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all_even_one_that_is_stopped(ranks, number, code):
    def stop_one_and_signal():
        os.kill(ranks.pids[1], signal.SIGSTOP)
        me(number)()

    found, seconds = ranks.run(OBEDIENT, OBEDIENT, then=stop_one_and_signal)
    assert found == code and seconds < 20
    assert len(ranks.said) == 1 and "rank 1" in ranks.said[0]


def test_a_second_signal_kills_at_once(ranks, monkeypatch):
    monkeypatch.setattr(starting, "GRACE_SECONDS", 300)
    code, seconds = ranks.run(DEAF, DEAF, then=me(signal.SIGINT, signal.SIGINT))
    assert code == 130 and seconds < 60
    assert ranks.said == ["killing the process of rank 0, 1: a second signal came."]


def test_a_rank_that_was_killed_is_named(ranks):
    code, _ = ranks.run(OBEDIENT, OBEDIENT, then=lambda: os.kill(ranks.pids[1], signal.SIGKILL))
    assert code == 5 and len(ranks.said) == 1
    assert "rank 1 was ended by SIGKILL" in ranks.said[0]


def test_a_signal_reaches_ranks_that_are_just_starting(ranks, monkeypatch):
    """They keep it until they are ready: without a traceback from the middle of an import."""
    monkeypatch.setattr(starting, "GRACE_SECONDS", 60)
    late = "import time; time.sleep(1)\n" + OBEDIENT.replace(
        "pathlib.Path(sys.argv[1]).touch()", ""
    )
    timer = threading.Timer(0.3, me(signal.SIGTERM))
    timer.start()
    code, _ = ranks.run(late, late)
    timer.join()
    assert code == 143 and ranks.said == []


def children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


def rank_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(each[5:]) for each in variables if each.startswith(b"RANK="))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_stopped_rank_does_not_keep_the_command(tmp_path):
    source = save_zeros(tmp_path / "source", 1 << 15)
    command = ["-m", "distprune", "prune", source, tmp_path / "out", "-s", "0.5"]
    process = start(*command, "--nproc", "2", "--json")
    assert process.stderr.readline().startswith("Prunes")
    pids = {rank_of(pid): pid for pid in children(process.pid)}
    os.kill(pids[1], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "a second signal came" in err
    assert json.loads(out)["exit_code"] == 130
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    process = start(*command, "-q")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert tree_digest(source) != tree_digest(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_there_is_one_document_when_the_first_rank_was_killed(tmp_path):
    command = ["prune", save_zeros(tmp_path / "source", 1 << 15), tmp_path / "out", "-s", "0.5"]
    process = start("-m", "distprune", *command, "--nproc", "2", "--json")
    assert process.stderr.readline().startswith("Prunes")
    pids = {rank_of(pid): pid for pid in children(process.pid)}
    os.kill(pids[0], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 5 and "Traceback" not in err
    document = json.loads(out)
    assert document["exit_code"] == 5 and "rank 0 was ended by SIGKILL" in document["error"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[1], 0)
        raise AssertionError("rank 1 is still there")


@pytest.mark.parametrize("arguments, code", [(("recipe", "ls"), 0), (("recipe", "show", "no"), 2)])
def test_a_rank_ends_without_the_shutdown_of_python(arguments, code):
    """There gloo may abort the process after its work is done, for a model that is sharded."""
    program = "import atexit; atexit.register(print, 'shut down')\n"
    program += "from distprune.cli.main import main\nmain()"
    for variables in ({"RANK": "0", "WORLD_SIZE": "1"}, {}):
        process = start("-c", program, *arguments, **variables)
        out, err = process.communicate(timeout=250)
        assert process.returncode == code, err
        assert out.endswith("shut down\n") == (not variables), out
        assert ("magnitude_50" in out) == (code == 0), out
