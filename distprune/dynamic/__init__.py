"""Methods that change the masks while a model trains: they drop elements, and let others grow.

They are a few lines on :func:`distprune.global_mask` and :func:`distprune.set_masks`; others are
written the same way, as ``examples/projections.py`` shows for AC/DC, ADMM and a proximal method.
"""

from distprune.dynamic.drop_and_grow import cosine_fraction as cosine_fraction
from distprune.dynamic.drop_and_grow import rigl_step as rigl_step
from distprune.dynamic.drop_and_grow import set_step as set_step

__all__ = ["cosine_fraction", "rigl_step", "set_step"]
