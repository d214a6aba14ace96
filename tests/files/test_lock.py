"""One run at a time has the lock of a destination; a process that ends gives it back."""

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from distprune.files.disk.destination import Lock
from distprune.files.errors import OutputError
from helpers.disk_crashes import run_forked


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


def test_a_second_run_is_refused(target):
    lock = Lock(target)
    lock.acquire()

    def second():
        with pytest.raises(OutputError, match=r"at work on .*target\.partial\.lock"):
            Lock(target).acquire()

    second()
    assert run_forked(second) == 0
    lock.release()
    assert not list(target.parent.iterdir())


def test_a_killed_run_has_no_lock(target):
    def take_and_die():
        Lock(target).acquire()
        os._exit(7)

    assert run_forked(take_and_die) != 0
    lock = Lock(target)
    lock.acquire()
    lock.release()
    assert not list(target.parent.iterdir())


def test_without_flock_there_is_no_lock(target, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    Lock(target).acquire()


def test_a_link_is_not_followed(target, tmp_path):
    target.with_name("target.partial.lock").symlink_to(tmp_path / "made")
    with pytest.raises(OutputError, match="symbolic links"):
        Lock(target).acquire()
    assert not (tmp_path / "made").exists()


def test_many_that_want_it_at_once_have_it_one_after_the_other(target):
    inside = target.with_name("inside")

    def take(_):
        for _ in range(100):
            lock = Lock(target)
            while True:
                try:
                    lock.acquire()
                    break
                except OutputError:
                    pass
            inside.mkdir()
            inside.rmdir()
            lock.release()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(take, range(3)))
    assert not list(target.parent.iterdir())
