"""Many shards with few open files: the limit of the process is kept, and no checkpoint's fault."""

import errno
import os
import resource

import pytest

from distprune.files.disk.access import OpenFiles, read_into, write_from
from distprune.files.errors import OutputError


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / str(i) for i in range(100)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]))
    return list(map(str, paths))


@pytest.fixture
def limit_of_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(number):
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def num_open():
    return len(os.listdir("/proc/self/fd"))


def read_all(files, paths):
    for i, path in enumerate(paths * 2):
        buffer = bytearray(1)
        read_into(files, path, 0, memoryview(buffer))
        assert buffer[0] == i % len(paths)


def test_few_are_open_however_many_there_are(paths):
    num_before = num_open()
    files = OpenFiles(os.O_RDONLY)
    read_all(files, paths)
    assert num_before < num_open() <= num_before + 32
    files.close()


def test_where_no_more_can_be_opened_fewer_are_kept_open(paths, limit_of_files):
    files, others = OpenFiles(os.O_RDONLY), OpenFiles(os.O_RDWR)
    read_all(files, paths[:20])
    write_from(others, paths[0], 0, b"\0")
    num_before = num_open()
    limit_of_files(num_before - 5)  # as if something else had opened many meanwhile
    read_all(files, paths)
    write_from(others, paths[0], 0, b"\0")
    limit_of_files(num_before + 5)  # to list what is open takes one more
    assert num_open() < num_before
    files.close()
    others.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_it_is_not_the_fault_of_the_checkpoint(paths, monkeypatch, code):
    def refusing(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refusing)
    files = OpenFiles(os.O_RDONLY)
    with pytest.raises(OutputError, match="ulimit -n") as error:
        read_into(files, paths[0], 0, memoryview(bytearray(1)))
    assert "cannot be read" not in str(error.value)
