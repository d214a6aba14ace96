"""A checkpoint of 8 billion weights, pruned by text: as stage_text.py, alone on the device."""

from __future__ import annotations

from stage import Stage, main
from stage_text import large


def eight_billion(stage: Stage) -> None:
    large(stage, 8, (("fisher", "none"), ("fisher", "least_squares")))


if __name__ == "__main__":
    main(eight_billion)
