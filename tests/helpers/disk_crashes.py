"""Kill a process, or let it fail, at a chosen call that changes the disk."""

import errno
import os
import signal
import traceback

import torch

STEPS = ("chmod", "fsync", "mkdir", "rename", "rmdir", "unlink", "write")


class Steps:
    """Counts the calls that change the disk, and calls a function before one of them.

    Args:
        at: the number of the call, from 1; 0: none.
        act: the function to call; it may raise.
        names: the functions of ``os`` that count.
    """

    def __init__(self, at=0, act=None, names=STEPS):
        self.count = 0
        self.has_acted = False
        self._at, self._act, self._names = at, act, names

    def __enter__(self):
        self._saved = {name: getattr(os, name) for name in self._names}
        for name, function in self._saved.items():
            setattr(os, name, self._counting(function))
        return self

    def __exit__(self, *_):
        for name, function in self._saved.items():
            setattr(os, name, function)

    def _counting(self, function):
        def counting(*args, **kwargs):
            self.count += 1
            if self.count == self._at:
                self.has_acted = True
                self._act()
            return function(*args, **kwargs)

        return counting


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def disk_is_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run_forked(function, *args):
    """Call a function in a child process; return its wait status, 0 if it did not raise."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            function(*args)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1]
