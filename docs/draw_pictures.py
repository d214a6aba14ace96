"""Draw the pictures of README.md and docs/ from committed results.

python docs/draw_pictures.py

The pictures are SVG, written as text: the same bytes on every machine, and a test compares them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from distprune.cli.inspect import make_grid

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "pictures"
RESULTS = DOCS.parent / "tests" / "benchmarks" / "results"
DARK, GREY, LIGHT = "#1a1a1a", "#666666", "#d9d9d9"
BLUE, GREEN, ORANGE, RED = "#0072b2", "#009e73", "#e69f00", "#d55e00"
PURPLE, PINK = "#8a5a9e", "#cc79a7"


def results(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


class Picture:
    """Shapes on a white page, in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif" '
            f'font-size="14">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]
        self.text(width / 2, 24, title, anchor="middle", size=16, weight="bold")

    def shape(self, name: str, **attributes: object) -> None:
        words = (f'{key.replace("_", "-")}="{_short(value)}"' for key, value in attributes.items())
        self.parts.append(f"<{name} {' '.join(words)}/>")

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 14,
        colour: str = DARK, weight: str = "normal", turned: bool = False,
    ) -> None:  # fmt: skip
        turn = f' transform="rotate(-90 {_short(x)} {_short(y)})"' if turned else ""
        self.parts.append(
            f'<text x="{_short(x)}" y="{_short(y)}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{colour}" font-weight="{weight}"{turn}>{escape(words)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = GREY) -> None:
        self.shape("line", x1=x, y1=y, x2=to_x, y2=to_y, stroke=colour, stroke_width=1.5)
        angle = math.atan2(to_y - y, to_x - x)
        corners = [(to_x, to_y)] + [
            (to_x - 8 * math.cos(angle + turn), to_y - 8 * math.sin(angle + turn))
            for turn in (0.4, -0.4)
        ]
        points = " ".join(f"{_short(x)},{_short(y)}" for x, y in corners)
        self.shape("polygon", points=points, fill=colour)

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def _short(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value))


@dataclass
class Line:
    """Points of one method.

    Attributes:
        label: next to the last point inside of the axes.
        points: (x, y), by x.
        is_marked: of points that were measured; others are computed, and dashed.
    """

    label: str
    colour: str
    points: list[tuple[float, float]]
    is_marked: bool = True


@dataclass
class Chart:
    """Lines over two axes; what is above the upper end of y is cut off there."""

    picture: Picture
    x_of: Callable[[float], float]
    y_of: Callable[[float], float]
    left: float
    right: float
    top: float
    bottom: float
    has_labels: bool = True
    taken: list[float] = field(default_factory=list)  # heights of the labels on the right

    def ticks(
        self, xs: Iterable[tuple[float, str]], ys: Iterable[tuple[float, str]], x: str, y: str
    ) -> None:
        for value, words in ys:
            height = self.y_of(value)
            self.picture.shape(
                "line", x1=self.left, y1=height, x2=self.right, y2=height, stroke=LIGHT
            )
            self.picture.text(self.left - 8, height + 5, words, anchor="end", colour=GREY)
        for value, words in xs:
            self.picture.text(
                self.x_of(value), self.bottom + 20, words, anchor="middle", colour=GREY
            )
        middle = (self.left + self.right) / 2
        self.picture.text(middle, self.bottom + 44, x, anchor="middle")
        if y:
            self.picture.text(16, (self.top + self.bottom) / 2, y, anchor="middle", turned=True)

    def line(self, line: Line) -> None:
        points = [(self.x_of(x), self.y_of(y)) for x, y in line.points]
        inside = [point for point in points if point[1] >= self.top]
        drawn = list(inside)
        leaves = len(inside) < len(points)
        if leaves:  # up to the edge
            (x, y), (to_x, to_y) = inside[-1], points[len(inside)]
            drawn.append((x + (to_x - x) * (y - self.top) / (y - to_y), self.top))
        dash = {} if line.is_marked else {"stroke_dasharray": "5 4"}
        path = " ".join(f"{_short(x)},{_short(y)}" for x, y in drawn)
        self.picture.shape(
            "polyline", points=path, fill="none", stroke=line.colour, stroke_width=2.5, **dash
        )
        for x, y in inside if line.is_marked else []:
            self.picture.shape("circle", cx=x, cy=y, r=4, fill=line.colour)
        x, y = drawn[-1]
        if not self.has_labels:
            return
        if x < self.right - 30 or leaves:  # above the point, and right of the axis
            half = 4 * len(line.label)
            self.picture.text(
                max(x, self.left + half), y - 10, line.label, anchor="middle", colour=line.colour
            )
        else:
            while any(abs(y - other) < 16 for other in self.taken):
                y -= 1
            self.taken.append(y)
            self.picture.text(x + 10, y + 5, line.label, colour=line.colour)


def logarithmic(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """From a value to a place: low is at first, high at last."""
    scale = (last - first) / math.log(high / low)
    return lambda value: first + scale * math.log(value / low)


@dataclass
class Panel:
    """Perplexity of one model on one text.

    Attributes:
        title: above the lines, if there are several panels.
        percents: the ends of the axis of sparsity.
        ticks: perplexities; above the last one lines are cut off.
    """

    title: str
    dense: float
    lines: list[Line]
    percents: tuple[int, int]
    ticks: tuple[int, ...]


# label, method of the table, whether it is polished, colour
METHODS = (
    ("distprune", "docstrings+own", True, BLUE),
    ("distprune, no text given", "own", True, GREEN),
    ("distprune, no polish", "docstrings+own", False, ORANGE),
    ("SparseGPT, polished", "sparsegpt", True, PINK),
    ("SparseGPT", "sparsegpt", False, PURPLE),
    ("Wanda", "wanda", False, RED),
    ("magnitude", "magnitude/row", False, GREY),
)
TABLE = RESULTS / "language_models_202611.jsonl"
MODEL = "gemma-3-270m"


def panels() -> list[Panel]:
    """What is in the table of one model, on a text of the calibration's kind and on another."""
    rows = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["model"] == MODEL]
    made = []
    for title, text in (
        ("Python documentation, as the text to prune by", "docstrings_held_out_begins.txt"),
        ("news", "news.txt"),
    ):
        lines = []
        for label, method, is_polished, colour in METHODS:
            points = [
                (100 * float(row["sparsity"]), mean_perplexity(row["texts"][text]))
                for row in rows
                if (row["method"], bool(row["polish"])) == (method, is_polished)
                and ":" not in row["sparsity"]
            ]
            lines.append(Line(label, colour, sorted(points)))
        dense = [mean_perplexity(row["texts"][text]) for row in rows if row["method"] == "dense"]
        ends = 50, max((round(x) for line in lines for x, _ in line.points), default=60)
        made += [Panel(title, each, lines, ends, (20, 30, 50, 100, 200, 400)) for each in dense]
    return made


def mean_perplexity(losses: Sequence[float]) -> float:
    """Of windows with the same number of tokens."""
    return math.exp(math.fsum(losses) / len(losses))


def perplexity() -> Picture:
    """Perplexity against sparsity, a line per method; beside each other on several texts."""
    drawn = panels()
    sentences = [
        f"{panel.title}: The dense model has {panel.dense:.2f}. "
        + "; ".join(
            f"{line.label}: " + ", ".join(f"{y:,.2f} at {x:g} %" for x, y in line.points)
            for line in panel.lines
        )
        for panel in drawn
    ]
    width = 360
    picture = Picture(
        240 + (width + 60) * len(drawn), 460, "Perplexity of Gemma-3-270M, just after pruning",
        f"Lower is better. {'. '.join(sentences)}.",
    )  # fmt: skip
    for number, panel in enumerate(drawn):
        draw_panel(picture, panel, 60 + (width + 60) * number, width)
    # A legend in place of labels.
    x = (width + 60) * len(drawn) + 20
    for number, line in enumerate(drawn[0].lines):
        y, top = 90 + 26 * number, drawn[0].ticks[-1]
        best = min(y for panel in drawn for _, y in panel.lines[number].points)
        words = f"{line.label} (above {top})" if best > top else line.label
        picture.shape("line", x1=x, x2=x + 20, y1=y, y2=y, stroke=line.colour, stroke_width=2.5)
        picture.text(x + 28, y + 5, words, colour=line.colour)
    return picture


def draw_panel(picture: Picture, panel: Panel, left: int, width: int) -> None:
    """The axes and lines of a panel; a line that is cut off as a whole has no place."""
    right, (first, last) = left + width, panel.percents
    x_of = lambda x: left + 10 + (x - first) * ((width - 20) / (last - first))  # noqa: E731
    y_of = logarithmic(panel.ticks[0], panel.ticks[-1], 400, 70)
    chart = Chart(picture, x_of, y_of, left, right, 70, 400, has_labels=False)
    chart.ticks(
        [(x, f"{x} %") for x in range(first, last + 1, 10)], [(y, str(y)) for y in panel.ticks],
        "zeros among the weights of all layers", "perplexity (lower is better)" * (left == 60),
    )  # fmt: skip
    picture.text((left + right) / 2, 56, panel.title, anchor="middle")
    y = y_of(panel.dense)
    picture.shape("line", x1=left, x2=right, y1=y, y2=y, stroke=DARK, stroke_dasharray="2 4")
    chart.taken.append(y)
    picture.text(left + 6, y + 16, f"dense: {panel.dense:.2f}")
    for line in panel.lines:
        if any(y <= panel.ticks[-1] for _, y in line.points):
            chart.line(line)


def layers() -> Picture:
    """The sparsity of each matrix at 60 %."""
    counts = results("sparsity_gemma3_270m_202611")["tensors"]
    names, kinds, rows = make_grid(counts)
    all_shares = [num_pruned / num_elements for _, num_elements, num_pruned in counts]
    low, high = min(all_shares), max(all_shares)
    picture = Picture(
        820, 90 + 20 * len(names), "Where the zeros are: 60 % of Gemma-3-270M, in %",
        "All matrices are ranked together, so each gets the sparsity that costs least: from "
        f"{100 * low:.1f} % to {100 * high:.1f} %. A row per layer, a column per kind of matrix.",
    )  # fmt: skip
    width = 700 / len(kinds)
    for column, kind in enumerate(kinds):
        picture.text(100 + width * (column + 0.5), 52, kind, anchor="middle", size=13)
    for number, (layer, shares) in enumerate(zip(names, rows, strict=True)):
        y = 62 + 20 * number
        picture.text(90, y + 15, f"layer {layer}", anchor="end", size=13)
        for column, share in enumerate(shares):
            depth = (share - low) / (high - low)
            picture.shape(
                "rect", x=100 + width * column, y=y, width=width - 2, height=18,
                fill=_between((230, 240, 248), (0, 82, 130), depth),
            )  # fmt: skip
            picture.text(
                100 + width * (column + 0.5), y + 14, f"{100 * share:.0f}", anchor="middle",
                size=12, colour="white" if depth > 0.45 else DARK,
            )  # fmt: skip
    return picture


def _between(low: Sequence[int], high: Sequence[int], depth: float) -> str:
    mixed = (round(a + (b - a) * depth) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def table_of_performance(title: str, name: str = "speed_2cores_202611") -> list[dict[str, Any]]:
    """The rows of a table of a result of the benchmark, by column."""
    for part in results(name)["parts"]:
        for table in part["tables"]:
            if table["title"].startswith(title):
                return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    raise LookupError(title)


def measured_on(ranks: Sequence[int]) -> list[dict[str, Any]]:
    """The calls of 100 million weights in float32 under FSDP2."""
    case = ("fsdp2", 100_000_000, "float32")
    return [
        row
        for row in table_of_performance("Sharded models on gloo ranks")
        if (row["wrapping"], row["elements"], row["dtype"]) == case and row["ranks"] in ranks
    ]


def call() -> Picture:
    """What a call of three ranks does, and what it sends."""
    (row,) = measured_on([2])
    sent = f"{row['KiB per rank']:.0f} KiB in {row['collectives']} sums"
    picture = Picture(
        820, 340, "One call: only small sums leave a rank",
        "Each rank reads its own shard of the weights and counts scores. Sums of the counts, "
        f"{sent} for 100 million weights, tell every rank the same cut: a threshold, and the place "
        "at which equal scores are divided. Each rank then writes the mask of its own shard.",
    )  # fmt: skip
    columns = (20, 215, 590)
    for x, words in zip(columns, ("READ", "DECIDE", "WRITE"), strict=True):
        picture.text(x, 62, words, weight="bold", colour=BLUE)
    _box(picture, 375, 80, 160, 230, "#e6f0f8")
    for y, words in ((140, "the same sums"), (160, "on every rank:")):
        picture.text(455, y, words, anchor="middle")
    picture.text(455, 195, "one cut of the", anchor="middle", weight="bold")
    picture.text(455, 215, "order of all", anchor="middle", weight="bold")
    picture.text(455, 260, sent, anchor="middle", size=12, colour=GREY)
    picture.text(455, 277, "for 100M weights", anchor="middle", size=12, colour=GREY)
    for rank in range(3):
        y = 80 + 85 * rank
        _box(picture, 20, y, 150, 60, "#f2f2f2")
        picture.text(95, y + 26, f"rank {rank}", anchor="middle", weight="bold")
        picture.text(95, y + 46, "its weights", anchor="middle", size=13)
        _box(picture, 215, y, 115, 60, "white")
        picture.text(272, y + 26, "scores,", anchor="middle", size=13)
        picture.text(272, y + 46, "counted", anchor="middle", size=13)
        _box(picture, 590, y, 210, 60, "#f2f2f2")
        picture.text(695, y + 26, "its slice of the mask that", anchor="middle", size=13)
        picture.text(695, y + 46, "one process would make", anchor="middle", size=13)
        picture.arrow(172, y + 30, 213, y + 30)
        picture.arrow(332, y + 30, 373, y + 30, BLUE)
        picture.arrow(537, y + 30, 588, y + 30, BLUE)
    return picture


def _box(picture: Picture, x: float, y: float, width: float, height: float, fill: str) -> None:
    picture.shape("rect", x=x, y=y, width=width, height=height, rx=6, fill=fill, stroke=GREY)


def held_zeros() -> Picture:
    """Where zeros are written in a training step of a sharded model."""
    picture = Picture(
        820, 250, "Zeros that hold: a training step of a pruned shard",
        "The shard of a rank has zeros where the mask prunes. Forward and backward gather it as it "
        "is, like a dense shard. The reduced gradient becomes zero where the mask prunes, before "
        "it is clipped. After the optimizer's step the same elements of the shard are set to zero "
        "again.",
    )  # fmt: skip
    kept = "1011001101"
    stations = (
        ("SHARD", "zeros where the", "mask prunes", BLUE),
        ("FORWARD", "and backward: gathered", "like a dense shard", BLUE),
        ("GRADIENT", "summed over ranks,", "then masked", GREEN),
        ("STEP", "any torch optimizer;", "then zero again", BLUE),
    )
    for number, (title, first, second, colour) in enumerate(stations):
        x = 20 + 203 * number
        _box(picture, x, 60, 170, 120, "#f2f2f2")
        picture.text(x + 85, 84, title, anchor="middle", weight="bold", colour=BLUE)
        for cell, is_kept in enumerate(kept):
            picture.shape(
                "rect", x=x + 10 + 15 * cell, y=98, width=14, height=18, stroke=GREY,
                fill=colour if is_kept == "1" else "white",
            )  # fmt: skip
        picture.text(x + 85, 142, first, anchor="middle", size=13)
        picture.text(x + 85, 162, second, anchor="middle", size=13)
        if number:
            picture.arrow(x - 31, 120, x - 3, 120)
    picture.shape(
        "polyline", points="714,182 714,215 105,215", fill="none", stroke=GREY, stroke_width=1.5
    )
    picture.arrow(105, 215, 105, 184)
    picture.text(410, 238, "the next step", anchor="middle", size=13, colour=GREY)
    return picture


def file() -> Picture:
    """The way of a checkpoint from its source to its result."""
    picture = Picture(
        820, 290, "A checkpoint's way: ranked as a whole, written file by file",
        "The headers of the source say what is there. Two reads of the weights give one cut of the "
        "order of all. Then each file is read, pruned and written beside its final name in "
        "DST.partial, and gets that name when its bytes are on the disk. When all files have "
        "theirs, one rename makes DST of DST.partial.",
    )  # fmt: skip
    columns = (20, 200, 380)
    for x, words in zip(columns, ("SRC", "RANK", "WRITE"), strict=True):
        picture.text(x, 62, words, weight="bold", colour=BLUE)
    _box(picture, 200, 80, 130, 160, "#e6f0f8")
    for y, words, weight in (
        (120, "a sample, then", "normal"), (140, "one read of all", "normal"),
        (180, "one cut of the", "bold"), (200, "order of all", "bold"),
    ):  # fmt: skip
        picture.text(265, y, words, anchor="middle", weight=weight)
    _box(picture, 370, 72, 270, 176, "white")
    picture.text(505, 266, "DST.partial", anchor="middle", size=13, colour=GREY)
    for number in range(3):
        y = 80 + 56 * number
        _box(picture, 20, y, 130, 48, "#f2f2f2")
        picture.text(85, y + 29, f"file {number + 1}", anchor="middle", size=13)
        picture.arrow(152, y + 24, 198, y + 24)
        picture.arrow(332, y + 24, 378, y + 24, BLUE)
        _box(picture, 380, y, 110, 48, "#f2f2f2")
        picture.text(435, y + 29, f"file {number + 1}.part", anchor="middle", size=13)
        picture.arrow(492, y + 24, 518, y + 24, BLUE)
        _box(picture, 520, y, 110, 48, "#f2f2f2")
        picture.text(575, y + 29, f"file {number + 1}", anchor="middle", size=13)
    picture.arrow(642, 160, 688, 160, BLUE)
    _box(picture, 690, 130, 110, 60, "#e6f0f8")
    picture.text(745, 165, "DST", anchor="middle", weight="bold")
    picture.text(745, 210, "one rename", anchor="middle", size=12, colour=GREY)
    return picture


def traffic() -> Picture:
    """Bytes that a rank sends, against ranks."""
    measured = [(float(row["ranks"]), 1024 * row["KiB per rank"]) for row in measured_on([2, 4])]
    computed = {
        model: [
            (float(row["ranks"]), 1024 * row["KiB sent"])
            for row in table_of_performance("Predictions", "cost_2cores_202611")
            if row["model"] == model
        ]
        for model in ("8B", "405B")
    }
    ranks = [2.0, *(x for x, _ in computed["8B"])]
    # Every other rank's shard has to arrive, four bytes for each weight.
    gathered = [(x, 4 * 8.0e9 * (x - 1) / x) for x in ranks]
    sends = ", ".join(f"{y / 1024:.0f} KiB on {x:g} ranks" for x, y in measured)
    picture = Picture(
        820, 420, "What a rank sends or receives in one pruning, float32",
        f"Measured, 100 million weights: {sends}. Computed from the same calls: 8 billion weights "
        f"{computed['8B'][-1][1] / 1024:.0f} KiB and 405 billion "
        f"{computed['405B'][-1][1] / 1024:.0f} KiB on any number of ranks. Gathering 8 billion "
        "weights: 16 GB on 2 ranks, and 32 GB on many.",
    )  # fmt: skip
    x_of = logarithmic(2, 4096, 110, 560)
    y_of = logarithmic(1e4, 1e11, 360, 60)
    chart = Chart(picture, x_of, y_of, 95, 580, 60, 360)
    chart.ticks(
        [(x, f"{x:,}") for x in (2, 8, 64, 512, 4096)],
        [(1e4, "10 kB"), (1e5, "100 kB"), (1e6, "1 MB"), (1e8, "100 MB"), (1e10, "10 GB")],
        "ranks", "bytes per rank",
    )  # fmt: skip
    chart.line(Line("gathering 8B weights (computed)", RED, gathered, is_marked=False))
    chart.line(Line("distprune, 8B (computed)", BLUE, computed["8B"], is_marked=False))
    chart.line(Line("distprune, 405B (computed)", PURPLE, computed["405B"], is_marked=False))
    chart.line(Line("distprune, 100M (measured)", GREEN, measured))
    return picture


PICTURES = {
    "perplexity.svg": perplexity,
    "layers.svg": layers,
    "call.svg": call,
    "traffic.svg": traffic,
    "held_zeros.svg": held_zeros,
    "file.svg": file,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
