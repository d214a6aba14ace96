"""Locks where flock works, where it does not, and where their owners are gone or on other hosts."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from distprune.files.disk import lock_owner, locking
from distprune.files.disk.locking import Lock
from distprune.files.errors import OutputError
from helpers.disk_crashes import run_forked

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
DEAD = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          stdout=subprocess.PIPE, check=True).stdout)  # fmt: skip


@pytest.fixture(params=[None, *UNSUPPORTED], ids=["flock", *map(errno.errorcode.get, UNSUPPORTED)])
def flock(request, monkeypatch):
    """Whether the file system has flock."""
    monkeypatch.setattr(locking, "_SETTLE_SECONDS", 0.01)
    if request.param is None:
        return True

    def refuse(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    return False


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


def path_of(target):
    return target.with_name("target.partial.lock")


@contextlib.contextmanager
def held(target, **kwargs):
    lock = Lock(target)
    lock.acquire(**kwargs)
    try:
        assert json.loads(path_of(target).read_text())["pid"] == os.getpid()
        yield lock
    finally:
        lock.release()


def owner(target, seconds_ago, **facts):
    """A lock that somebody left, with a heartbeat of that age."""
    path_of(target).write_text(json.dumps(facts))
    now = time.time()
    os.utime(path_of(target), (now - seconds_ago, now - seconds_ago))


def elsewhere(**more):
    return {"host": "elsewhere", "boot": "another", "processes": 1, "pid": 1, "token": "x", **more}


def here(**more):
    return {
        "host": socket.gethostname(),
        "boot": lock_owner.boot_id(),
        "processes": lock_owner.process_namespace(),
        "pid": DEAD,
        "token": "x",
        **more,
    }


def test_it_is_there_while_held_and_gone_afterwards(flock, target):
    with held(target):
        assert json.loads(path_of(target).read_text())["pid"] == os.getpid()
    assert list(target.parent.iterdir()) == []


def test_a_second_one_is_refused_by_the_name_of_the_first(flock, target):
    me = os.getpid()

    def second():
        with pytest.raises(OutputError, match=f"process {me} on .* (is|was) at work"):
            Lock(target).acquire()

    with held(target):
        second()  # in this process
        assert run_forked(second) == 0
    with held(target):
        pass


def test_a_dead_process_of_this_machine_holds_nothing(flock, target):
    owner(target, 0, **here())
    with held(target):
        pass
    assert list(target.parent.iterdir()) == []


def test_a_number_that_is_this_process_after_a_restart_holds_nothing(flock, target):
    owner(target, 0, **here(pid=os.getpid()))
    with held(target):
        pass


def test_a_killed_owner_holds_nothing(flock, target):
    def take_and_die():
        Lock(target).acquire()
        os._exit(7)

    assert run_forked(take_and_die) != 0
    assert path_of(target).exists()
    with held(target):
        pass


def test_another_host_is_at_work_while_its_heart_beats(flock, target):
    owner(target, 30, **elsewhere())
    with pytest.raises(OutputError, match=r"process 1 on elsewhere was at work .* in (89|90) sec"):
        Lock(target).acquire()
    assert json.loads(path_of(target).read_text())["host"] == "elsewhere"


def test_another_host_whose_heart_stopped_needs_no_rm(flock, target):
    owner(target, 130, **elsewhere())
    with held(target) as lock:
        lock.confirm()
    assert list(target.parent.iterdir()) == []


def test_this_host_before_its_last_start_is_judged_by_the_heartbeat(flock, target):
    owner(target, 30, **here(boot="an earlier one"))
    with pytest.raises(OutputError, match="was at work"):
        Lock(target).acquire()
    owner(target, 130, **here(boot="an earlier one"))
    with held(target):
        pass


def test_take_over_does_not_wait(flock, target):
    owner(target, 0, **elsewhere())
    with held(target, take_over=True) as lock:
        lock.confirm()


def test_an_owner_that_was_taken_over_stops_and_leaves_the_lock_alone(target, monkeypatch):
    monkeypatch.setattr(locking, "_BEAT_SECONDS", 0.05)
    lock = Lock(target)
    lock.acquire()
    owner(target, 0, **elsewhere(token="new"))
    until = time.monotonic() + 30
    with pytest.raises(OutputError, match="process 1 on elsewhere has taken over"):
        while time.monotonic() < until:
            lock.check()
            time.sleep(0.02)
    lock.release()
    assert json.loads(path_of(target).read_text())["token"] == "new"


def test_a_removed_lock_is_noticed_before_what_cannot_be_undone(flock, target):
    lock = Lock(target)
    lock.acquire()
    path_of(target).unlink()
    with pytest.raises(OutputError, match="removed"):
        lock.confirm()
    lock.release()


def test_the_heart_beats(flock, target, monkeypatch):
    monkeypatch.setattr(locking, "_BEAT_SECONDS", 0.05)
    with held(target):
        os.utime(path_of(target), (1, 1))
        until = time.monotonic() + 30
        while path_of(target).stat().st_mtime < 1000 and time.monotonic() < until:
            time.sleep(0.02)
        assert path_of(target).stat().st_mtime > 1000


def test_the_clock_of_this_machine_does_not_matter(flock, target, monkeypatch):
    owner(target, 30, **elsewhere())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with pytest.raises(OutputError, match=r"was at work on this destination 3. seconds ago"):
        Lock(target).acquire()


def test_a_running_process_of_this_machine_is_not_taken_over(target):
    def second():
        with pytest.raises(OutputError, match="A running process is not taken over"):
            Lock(target).acquire(take_over=True)

    with held(target) as lock:
        assert run_forked(second) == 0
        lock.confirm()


def test_a_lock_that_a_server_keeps_for_a_lost_host_is_replaced(target, monkeypatch):
    """flock says that another host has it; with --take-over there is a new file."""
    owner(target, 0, **elsewhere())
    old, really = os.stat(path_of(target)).st_ino, fcntl.flock

    def server(descriptor, how):
        if os.fstat(descriptor).st_ino == old:
            raise BlockingIOError(errno.EWOULDBLOCK, "held")
        really(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", server)
    keep = path_of(target).open()  # so that the number of the file is not used again
    with pytest.raises(OutputError, match="add --take-over"):
        Lock(target).acquire()
    with held(target, take_over=True) as lock:
        lock.confirm()
    keep.close()


def test_whatever_the_file_holds_is_no_traceback(flock, target):
    for raw in (b"", b"\0" * 50, b"{", b"[1]", b'{"pid": {}}', b"\xff" * 5000):
        path_of(target).write_bytes(raw)
        os.utime(path_of(target), (1, 1))
        with held(target):
            pass


def test_two_that_sign_at_once_are_not_both_owners(target, monkeypatch):
    """Without flock, the last one that signs the file has it."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "")))

    def other_signs(_):
        owner(target, 0, **elsewhere(token="the other"))

    owner(target, 500, **elsewhere())
    monkeypatch.setattr(time, "sleep", other_signs)
    with pytest.raises(OutputError, match="was at work"):
        Lock(target).acquire()


def test_a_lock_does_not_speak_to_the_terminal(target):
    owner(target, 0, **elsewhere(host="\x1b[2J", pid="\x1b]0;x\x07"))
    with pytest.raises(OutputError) as error:
        Lock(target).acquire()
    assert str(error.value).isprintable()


def test_a_lock_that_cannot_be_read_for_a_while_is_not_lost(target, monkeypatch):
    def fail(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with held(target) as lock:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", fail)
            lock.confirm()
        lock.confirm()
