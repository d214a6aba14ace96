"""What a call costs on ranks, devices and models that are not here: a model, and predictions.

    seconds = fixed + per_parameter * parameters + per_element * local elements
              + collectives * latency(ranks) + bytes / link

The constants are fitted to calls that are measured in the same run, and every one of these calls is
shown beside what the model says of it. Sizes of scratch memory and of messages come from what the
library does, and are computed where nothing was run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

import device_traffic
from cost_constants import Model, fit
from cost_points import DTYPES, NUM_CORES, Measured, measure_points
from cost_predictions import predictions
from measuring import Bound, Cell, Options, Table, Verdict


def tables(options: Options) -> Iterator[Table]:
    points = measure_points(options)
    model = fit(points)
    yield constants(model)
    yield residuals(model, points)
    traffic = device_traffic.in_a_process()
    yield of_devices(traffic)
    yield predictions(model, traffic)


def constants(model: Model) -> Table:
    rows: list[list[Cell]] = [
        ["fixed, ms", model.fixed * 1e3, "fitted"],
        ["per parameter, us", model.per_parameter * 1e6, "fitted"],
    ]
    for dtype in DTYPES:
        seconds = model.per_element[dtype]
        rows.append([f"per element {dtype}, ns", seconds * 1e9, "fitted"])
        moved = seconds * model.bandwidth
        rows.append([f"the same in bytes read, {dtype}", moved, "fitted x measured bandwidth"])
    rows += [
        ["per hop of an all-reduce, us", model.hop * 1e6, "fitted"],
        ["memory bandwidth, one thread reads, GB/s", model.bandwidth / 1e9, "measured"],
        ["link of two ranks, all-reduce of 8 MB, GB/s", model.link / 1e9, "measured"],
        ["all-reduces of a call", model.collectives, "measured, the most of all calls"],
    ]
    for name, value in zip(
        ("fixed", "per parameter", "per all-reduce"), model.message, strict=True
    ):
        rows.append([f"bytes sent per rank, {name}", round(value, 1), "fitted"])
    return Table("Constants of the cost model", ["constant", "value", "how"], rows)


def of_devices(traffic: Mapping[str, tuple[float, float]]) -> Table:
    rows: list[list[Cell]] = []
    for name, (by_torch, by_kernels) in traffic.items():
        dtype, *pruned = name.split()
        least = (4 if dtype == "float32" else 2) + 1 + len(pruned)
        masks = "bool, read too" if pruned else "none yet"
        rows.append([dtype, masks, least, round(by_torch, 1), round(by_kernels, 2)])
    most = max(row[-1] / row[2] for row in rows)  # type: ignore[operator]
    return Table(
        "Bytes per element that the reading pass of a device moves, with the drafted masks",
        ["dtype", "mask in force", "have to move", "torch operations", "Triton kernels"],
        rows,
        [Verdict(Bound("bytes that the kernels move, per byte that has to", 1.1), most)],
        [
            "Counted, not timed: what each operation of torch reads and writes, and what each load "
            "and store of the interpreted kernels touches. No device was used.",
        ],
    )


def residuals(model: Model, measured: Measured) -> Table:
    rows: list[list[Cell]] = []
    errors = []
    for p in measured.points:
        computed = model.of_point(p)
        errors.append(100 * (computed - p.seconds) / p.seconds)
        rows.append(
            [
                p.dtype, p.num_ranks, p.num_elements, p.num_parameters, p.num_collectives,
                p.num_bytes / 1024 if p.num_ranks > 1 else 0.0, p.seconds, computed,
                f"{errors[-1]:+.0f}",
            ]
        )  # fmt: skip
    typical = statistics.median(map(abs, errors))
    return Table(
        "The calls that the cost model was fitted to: FSDP2, gloo ranks of one thread each",
        [
            "dtype", "ranks", "elements", "parameters", "collectives", "KiB per rank",
            "measured s", "computed s", "error %",
        ],
        rows,
        [Verdict(Bound("median error of the cost model, %", 25, is_aim=True), typical)],
        [
            "Measured: the slowest rank of the quickest round. Computed: by the model, from the "
            "sizes, collectives and bytes of the same call.",
            f"More ranks than the {NUM_CORES} cores take turns: elements, parameters and the fixed "
            "part count ranks/cores times.",
        ],
    )  # fmt: skip
