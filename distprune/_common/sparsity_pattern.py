"""Pattern, N:M or tiles; without numpy, because the help of the command line does without."""

from __future__ import annotations

import re
from typing import Any

_FORM = re.compile("([0-9]{1,4})([:x])([0-9]{1,4})")
# Without quotes, YAML may read it as a number to the base of 60.
_EXPECTED = 'how many of how many are kept, such as "2:4", in quotes'
_OR_TILES = ', or tiles of outputs and inputs, such as "4x4"'


class Pattern(str):
    """A pattern of zeros: its text, without leading zeros.

    "N:M" keeps N of every M neighbours along the inputs; "AxB" prunes whole tiles of A outputs and
    B inputs. Make one with :meth:`parse`.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, value: Any, *, tiles: bool = True) -> Pattern:
        """A pattern from its text; ``tiles=False`` takes N:M only.

        Raises:
            ValueError: with what was expected.
        """
        match = _FORM.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            first, mark, second = int(match[1]), match[2], int(match[3])
            is_good = 0 < first < second if mark == ":" else tiles and first * second > 1
            if is_good:
                return cls(f"{first}{mark}{second}")
        raise ValueError(_EXPECTED + _OR_TILES * tiles)

    @property
    def kept_of(self) -> tuple[int, int] | None:
        """(N, M); None of tiles."""
        return self._numbers(":")

    @property
    def tile(self) -> tuple[int, int] | None:
        """(A, B): outputs and inputs of a tile; None of N:M."""
        return self._numbers("x")

    def _numbers(self, mark: str) -> tuple[int, int] | None:
        first, found, second = self.partition(mark)
        return (int(first), int(second)) if found else None
