"""Fit what a call costs to committed results, and say what follows for ranks and models elsewhere.

    python tests/benchmarks/fit_cost.py [--save NAME]

    seconds of the host  = fixed + per parameter * parameters
    seconds of a call    = host + per element * local elements + all-reduces * hops(ranks) * hop
                           + bytes / link
    bytes sent by a rank = histogram * (all-reduces - small ones) + per parameter * parameters

The constants are least squares of relative errors, none of which is negative. Nothing is measured
here: calls under FSDP2 are in results/performance_2cores_202611, and the price of each of many
small parameters, which has changed since, is in results/many_parameters_2cores_202611.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench import RESULTS, save
from measuring import Cell, Table

CALLS, MANY = "performance_2cores_202611", "many_parameters_2cores_202611"
WIDTH = 64  # of the many small parameters
NUM_CORES = 2  # of the machine of these results; ranks beyond these take turns
DTYPES = ("float32", "bfloat16")
NUM_RANKS = (8, 64, 512, 1024, 4096)
KIB, NS, US, MS = 1024, 1e-9, 1e-6, 1e-3


@dataclass(frozen=True)
class Constants:
    """Seconds and bytes.

    Attributes:
        host: of a call on one rank: fixed, and per parameter.
        per_element: by dtype, of one rank that has a core for itself.
        hop: of a small all-reduce from one rank to the next.
        link: bytes per second of a large one; measured.
        histogram, num_small, of_parameter: bytes of an all-reduce with a histogram; how many
            all-reduces of a call have a few words only; bytes per parameter.
        num_reduces: the most all-reduces of a call; measured.
    """

    host: tuple[float, float]
    per_element: Mapping[str, float]
    hop: float
    link: float
    histogram: float
    num_small: float
    of_parameter: float
    num_reduces: int

    def of_host(self, num_parameters: int) -> float:
        fixed, each = self.host
        return fixed + each * num_parameters

    def bytes_sent(self, num_parameters: int, num_reduces: int) -> float:
        """By each rank, however many there are."""
        return self.histogram * (num_reduces - self.num_small) + self.of_parameter * num_parameters


def hops(num_ranks: int) -> int:
    """Of one all-reduce in gloo, which goes around a ring twice."""
    return 2 * (num_ranks - 1)


def fit() -> tuple[Constants, Table]:
    """The constants, and each call beside what they say of it."""
    calls = _rows(CALLS, "The calls that the cost model was fitted to")
    of_machine = {row["constant"]: row["value"] for row in _rows(CALLS, "Constants of the cost")}
    link = 1e9 * of_machine["link of two ranks, all-reduce of 8 MB, GB/s"]
    sending = [row for row in calls if row["ranks"] > 1]
    sent = [KIB * row["KiB per rank"] for row in sending]
    histogram, of_small, of_parameter = _fitted(
        [[row["collectives"], -1.0, row["parameters"]] for row in sending], sent
    )
    rows, seconds = [], []
    for row in calls:
        turns = max(1.0, row["ranks"] / NUM_CORES)
        local = turns * row["elements"] / row["ranks"]
        by_dtype = [local if row["dtype"] == dtype else 0.0 for dtype in DTYPES]
        latency = row["collectives"] * hops(row["ranks"])
        rows.append([turns, turns * row["parameters"], *by_dtype, latency])
        seconds.append(row["measured s"] - KIB * row["KiB per rank"] / link)
    # What these calls took for each parameter is of an earlier version.
    _, _, *of_dtypes, hop = _fitted(rows, seconds)
    per_element = dict(zip(DTYPES, of_dtypes, strict=True))
    many = [
        row for row in _rows(MANY, "Many parameters, fsdp2") if row["parameters"] != "ResNet-50"
    ]
    numbers = [int(row["parameters"].replace(",", "")) for row in many]
    whole = [MS * n * row["first"] for n, row in zip(numbers, many, strict=True)]
    of_elements = per_element["float32"] * WIDTH * WIDTH
    fixed, each = _fitted(
        [[1.0, n] for n in numbers],
        [t - n * of_elements for n, t in zip(numbers, whole, strict=True)],
    )
    constants = Constants(
        (fixed, each), per_element, hop, link, histogram, of_small / histogram, of_parameter,
        max(row["collectives"] for row in calls),
    )  # fmt: skip
    return constants, _compared(constants, sending, sent, numbers, whole, of_elements)


def _compared(
    constants: Constants,
    sending: Sequence[Mapping[str, Any]],
    sent: Sequence[float],
    numbers: Sequence[int],
    whole: Sequence[float],
    of_elements: float,
) -> Table:
    of_bytes = [
        constants.bytes_sent(row["parameters"], row["collectives"]) / own - 1
        for row, own in zip(sending, sent, strict=True)
    ]
    of_host = [
        (constants.of_host(n) + n * of_elements) / own - 1
        for n, own in zip(numbers, whole, strict=True)
    ]
    rows: list[list[Cell]] = [
        [what, len(errors), 100 * statistics.median(map(abs, errors)), 100 * max(map(abs, errors))]
        for what, errors in (("bytes sent", of_bytes), ("seconds of many parameters", of_host))
    ]
    return Table(
        "The measurements beside what the constants say of them",
        ["", "measurements", "median error, %", "largest, %"],
        rows,
    )


def constants_table(found: Constants) -> Table:
    fixed, each = found.host
    rows: list[list[Cell]] = [
        ["fixed, ms", fixed / MS, "fitted"],
        ["per parameter, us", each / US, "fitted"],
        *([f"per element {d}, ns", found.per_element[d] / NS, "fitted"] for d in DTYPES),
        ["per hop of an all-reduce, us", found.hop / US, "fitted"],
        ["link of two ranks, GB/s", found.link / 1e9, "measured"],
        ["all-reduces of a call", found.num_reduces, "measured, the most of all calls"],
        ["of these without a histogram", found.num_small, "fitted"],
        ["bytes of a histogram", found.histogram, "fitted"],
        ["bytes per parameter", found.of_parameter, "fitted"],
    ]
    return Table("Constants of a call", ["constant", "value", "how"], rows)


@dataclass(frozen=True)
class Llama:
    """Sizes of a language model; weights only."""

    name: str
    num_layers: int
    width: int
    key_width: int
    inner: int
    vocabulary: int = 128_256

    def shapes(self) -> list[tuple[int, ...]]:
        """Of all parameters."""
        w, k, i = self.width, self.key_width, self.inner
        layer = [(w, w), (k, w), (k, w), (w, w), (i, w), (i, w), (w, i), (w,), (w,)]
        return [(self.vocabulary, w), *layer * self.num_layers, (w,), (self.vocabulary, w)]


MODELS = (
    Llama("8B", 32, 4096, 1024, 14336),
    Llama("70B", 80, 8192, 1024, 28672),
    Llama("405B", 126, 16384, 1024, 53248),
)


def predictions(found: Constants) -> Table:
    """For models and ranks that are not here."""
    rows: list[list[Cell]] = []
    for model, num_ranks in itertools.product(MODELS, NUM_RANKS):
        shapes = model.shapes()
        # FSDP2 cuts rows; the first rank has the most.
        local = sum(-(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes)
        host = found.of_host(len(shapes))
        latency = found.num_reduces * hops(num_ranks) * found.hop
        sent = found.bytes_sent(len(shapes), found.num_reduces)
        call = host + found.per_element["bfloat16"] * local + latency + sent / found.link
        rows.append([model.name, num_ranks, len(shapes), host, latency, call, sent / KIB])
    return Table(
        "Predictions: one call, bfloat16, FSDP2 on CPUs, gloo; nothing in this table was measured",
        ["model", "ranks", "parameters", "host s", "latency s", "call s", "KiB sent"],
        rows,
        notes=["Each rank has a core, and the link of these results. Latency: around a ring."],
    )


def tables() -> list[Table]:
    found, compared = fit()
    return [constants_table(found), compared, predictions(found)]


def _rows(name: str, title: str) -> list[dict[str, Any]]:
    """The rows of a table of a committed result, by column."""
    found = json.loads(Path(RESULTS, f"{name}.json").read_text(encoding="utf-8"))
    (table,) = (
        table
        for part in found["parts"]
        for table in part["tables"]
        if table["title"].startswith(title)
    )
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _fitted(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Least squares of relative errors over every set of unknowns; none is negative."""
    target = np.array(targets)
    matrix = np.array(rows) / target[:, None]
    # Columns differ by ten orders of magnitude.
    scale = np.abs(matrix).max(axis=0)
    best, least = np.zeros(len(scale)), float(len(target))
    for size in range(1, len(scale) + 1):
        for chosen in map(list, itertools.combinations(range(len(scale)), size)):
            solution, *_ = np.linalg.lstsq(
                matrix[:, chosen] / scale[chosen], np.ones(len(target)), rcond=None
            )
            error = float(((matrix[:, chosen] / scale[chosen] @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(len(scale)), error
                best[chosen] = solution / scale[chosen]
    found: list[float] = best.tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.txt and .json")
    name = parser.parse_args().save
    command = " ".join(["python tests/benchmarks/fit_cost.py", *sys.argv[1:]])
    found = tables()
    text = "\n\n".join([command, *(table.text() for table in found)]) + "\n"
    print(text, end="")
    if name:
        parts = [{"part": "fit_cost", "tables": [table.json() for table in found]}]
        save(name, text, {"command": command, "parts": parts})


if __name__ == "__main__":
    main()
