"""Aliases for pickled pruners, which name this module; the classes are in ``amount``."""

from distprune._common.amount import Bounded as Bounded
from distprune._common.amount import Bounds as Bounds
