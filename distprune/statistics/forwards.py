"""What a forward has seen counts when it returns, and is forgotten when it raises.

[Note: whole forwards] What a layer was called with is noted, and counts once the outermost call
of a module has returned:

    model        begins .............................................. returns: the rest counts
      layers.0       begins .. returns: noted
      layers.1                            begins .. raises: notes since then are forgotten

So a model that ran out of memory in a layer may be called again with a smaller batch.

Calls of several modules by hand have no outermost call. A block, see :meth:`Forwards.block`, makes
them one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn


@dataclass
class _Call:
    """A call of a module that has not ended.

    Attributes:
        module: what is called.
        num_notes: how many notes there were when it began.
        has_returned: whether its forward did.
    """

    module: nn.Module
    num_notes: int
    has_returned: bool = False


class Forwards:
    """Notes of what calls of modules have seen; see [Note: whole forwards].

    Attributes:
        problem: why it is not known what counts, if so.
    """

    def __init__(self) -> None:
        self.problem: RuntimeError | None = None
        self._notes: list[Callable[[], object]] = []
        self._calls: list[_Call] = []
        self._num_blocks = 0

    def note(self, keep: Callable[[], object]) -> None:
        """Call ``keep`` once it is certain that the present call counts."""
        self._notes.append(keep)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Begin and end here: no call may be left open."""
        with self._nothing_left_open():
            yield
        self._keep_if_whole()

    def begin(self, module: nn.Module) -> None:
        """A call of a module begins."""
        self._calls.append(_Call(module, len(self._notes)))

    def returned(self, module: nn.Module) -> None:
        """The forward of a module returned."""
        if self._is_last(module):
            self._calls[-1].has_returned = True

    def end(self, module: nn.Module) -> None:
        """A call of a module ends; what was noted in one that did not return is forgotten."""
        if self._is_last(module):
            call = self._calls.pop()
            if not call.has_returned:
                del self._notes[call.num_notes :]
            self._keep_if_whole()

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Make all calls inside one: if the block raises, none of them counts."""
        num_notes = len(self._notes)
        self._num_blocks += 1
        try:
            with self._nothing_left_open():
                yield
        except BaseException:
            del self._notes[num_notes:]
            raise
        finally:
            self._num_blocks -= 1
            self._keep_if_whole()

    @contextlib.contextmanager
    def _nothing_left_open(self) -> Iterator[None]:
        """End what an error that torch does not show to hooks, such as Ctrl-C, has left open."""
        num_calls = len(self._calls)
        try:
            yield
            if len(self._calls) > num_calls:
                self._give_up("a forward was interrupted, and others followed in the same context")
        finally:
            if len(self._calls) > num_calls:
                del self._notes[self._calls[num_calls].num_notes :]
                del self._calls[num_calls:]

    def _is_last(self, module: nn.Module) -> bool:
        """Whether a call of the module is the last that has begun and not ended."""
        return bool(self._calls) and self._calls[-1].module is module

    def _keep_if_whole(self) -> None:
        if self._calls or self._num_blocks:
            return
        notes, self._notes = self._notes, []
        try:
            for keep in notes:
                keep()
        except BaseException:
            self._give_up("an error came while the inputs of a forward were added")
            raise

    def _give_up(self, what: str) -> None:
        self.problem = RuntimeError(
            f"{what}, so that it is not known which inputs count; expected new statistics, "
            "collected again."
        )
