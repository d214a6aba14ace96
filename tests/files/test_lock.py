"""One run at a time has the lock of a destination; a process that ends gives it back."""

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from distprune.files.errors import OutputError
from distprune.files.output import locked
from helpers.disk_crashes import run_forked


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


def test_a_second_run_is_refused(target):
    def second():
        with pytest.raises(OutputError, match=r"at work.*partial\.lock"), locked(target):
            pass

    with locked(target):
        second()
        assert run_forked(second) == 0
    assert not list(target.parent.iterdir())


def test_a_killed_run_has_no_lock(target):
    def take_and_die():
        with locked(target):
            os._exit(7)

    assert run_forked(take_and_die) != 0
    with locked(target):
        pass
    assert not list(target.parent.iterdir())


def test_without_flock_there_is_no_lock(target, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(target), locked(target):
        pass


def test_many_that_want_it_at_once_have_it_one_after_the_other(target):
    inside = target.with_name("inside")

    def take(_):
        for _ in range(100):
            while True:
                try:
                    with locked(target):
                        inside.mkdir()
                        inside.rmdir()
                    break
                except OutputError:
                    pass

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(take, range(3)))
    assert not list(target.parent.iterdir())
