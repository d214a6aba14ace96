"""Locks where flock works, where it does not, and where their owners are gone or on other hosts."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from distprune.files.disk import access, destination
from distprune.files.disk.destination import Lock
from distprune.files.errors import OutputError
from helpers.disk_crashes import run_forked
from helpers.sampling import every

UNSUPPORTED = every(3, (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
DEAD = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          stdout=subprocess.PIPE, check=True).stdout)  # fmt: skip


@pytest.fixture(params=[None, *UNSUPPORTED], ids=["flock", *map(errno.errorcode.get, UNSUPPORTED)])
def flock(request, monkeypatch):
    """Whether the file system has flock."""
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
def held(target):
    lock = Lock(target)
    lock.acquire()
    try:
        assert json.loads(path_of(target).read_text())["pid"] == os.getpid()
        yield lock
    finally:
        lock.release()


def owner(target, **facts):
    """A lock that somebody left."""
    path_of(target).write_text(json.dumps(facts))


def elsewhere(**more):
    since = "2026-01-02 03:04:05+00:00"
    return {"host": "elsewhere", "boot": "another", "pid": 1, "since": since, "token": "x", **more}


def here(**more):
    boot = destination._boot_id()
    return {"host": socket.gethostname(), "boot": boot, "pid": DEAD, "token": "x", **more}


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


@pytest.mark.parametrize(
    "facts",
    [{}, {"pid": os.getpid()}, {"boot": "an earlier one"}, {"host": "another container"}],
    ids=["dead", "a pid that is used again", "before a restart", "another container"],
)
def test_who_held_flock_on_this_machine_holds_nothing_now(target, facts):
    owner(target, **here(**facts))
    with held(target):
        pass
    assert list(target.parent.iterdir()) == []


def test_a_killed_owner_is_in_the_way_only_without_flock(flock, target):
    def take_and_die():
        Lock(target).acquire()
        os._exit(7)

    assert run_forked(take_and_die) != 0
    assert path_of(target).exists()
    if not flock:
        with pytest.raises(OutputError, match=r"\(since 20.*if it has ended, remove it"):
            Lock(target).acquire()
        path_of(target).unlink()
    with held(target):
        pass


def test_another_host_is_refused_until_the_user_removes_its_file(flock, target):
    owner(target, **elsewhere())
    words = r"process 1 on elsewhere \(since 2026-01-02 03:04:05\+00:00\) was at work .* remove it"
    with pytest.raises(OutputError, match=words):
        Lock(target).acquire()
    assert json.loads(path_of(target).read_text())["host"] == "elsewhere"
    path_of(target).unlink()
    with held(target) as lock:
        lock.check()
    assert list(target.parent.iterdir()) == []


def test_an_owner_that_was_replaced_stops_and_leaves_the_lock_alone(flock, target):
    lock = Lock(target)
    lock.acquire()
    owner(target, **elsewhere(token="new"))
    with pytest.raises(OutputError, match=r"process 1 on elsewhere \(since .* has replaced"):
        lock.check()
    lock.release()
    assert json.loads(path_of(target).read_text())["token"] == "new"


def test_a_removed_lock_is_noticed_before_what_cannot_be_undone(flock, target):
    lock = Lock(target)
    lock.acquire()
    path_of(target).unlink()
    with pytest.raises(OutputError, match="removed"):
        lock.check()
    lock.release()


def test_whatever_the_file_holds_is_no_traceback(flock, target):
    for raw in (b"", b"\0" * 50, b"{", b"[1]", b'{"pid": {}}', b"\xff" * 5000, b"[" * 9999):
        path_of(target).write_bytes(raw)
        with contextlib.suppress(OutputError), held(target):
            pass


def test_a_file_that_was_never_signed_holds_nothing(target):
    path_of(target).touch()
    with held(target):
        pass


def test_many_that_want_it_at_once_have_it_one_after_the_other(target):
    """No two have the lock at the same time, and each gets it at last."""
    owner(target, **here())
    inside = target.with_name("inside")

    def take(_):
        for _ in range(100):
            lock = Lock(target)
            while True:
                try:
                    lock.acquire()
                    break
                except OutputError as error:
                    assert "at work" in str(error)
            inside.mkdir()
            inside.rmdir()
            lock.release()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(take, range(3)))
    assert list(target.parent.iterdir()) == []


def test_a_lock_does_not_speak_to_the_terminal(target):
    owner(target, **elsewhere(host="\x1b[2J", pid="\x1b]0;x\x07"))
    with pytest.raises(OutputError) as error:
        Lock(target).acquire()
    assert str(error.value).isprintable()


def test_a_lock_that_cannot_be_read_for_a_while_is_not_lost(target, monkeypatch):
    def fail(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with held(target) as lock:
        with monkeypatch.context() as patch:
            patch.setattr(access, "read_small", fail)
            lock.check()
        lock.check()
