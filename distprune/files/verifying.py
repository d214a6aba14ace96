"""What checkpoints hold: a result compared with its source, zeros counted, two compared.

``verify`` ranks the source of a pruned checkpoint again, by the recipe in the report, with the
statistics beside it if the scores are made from some. Masks, pruned and kept elements, and all
copied files are compared tensor by tensor and file by file. Of kept weights that an update has
moved, the report has checksums.

[Note: rounds] The last of several rounds ranked what the round before left, which is gone: nothing
tells whether these are the lowest scores. There the masks of the result say what is pruned, and
everything else is compared.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from distprune.base import memory
from distprune.base.blocks import Layout
from distprune.base.selecting import PLAIN_FLOATS
from distprune.files import pruning
from distprune.files.checkpoint import Checkpoint, SourceFile, TensorEntry
from distprune.files.disk import REPORT_FILE, pieces_of, read_into
from distprune.files.errors import CheckpointError, SelectionError, printable
from distprune.files.mask_files import MASK_FILE, MaskFile, mask_header, open_masks
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, Plan, plan
from distprune.files.ranked import Piece, Pieces, RankedTensors
from distprune.files.reports import Counts, Report, identity_of, read_report, recipe_of
from distprune.files.selecting import Layouts
from distprune.files.team import Progress, Team
from distprune.ranks.collectives import world


@dataclass(frozen=True)
class VerifyReport:
    """The result of a comparison.

    Attributes:
        problems: everything that is wrong; empty if the result is what the recipe asks for.
        num_bytes: how many bytes of the source were compared.
        num_elements: how many elements the selected tensors have.
        num_pruned: how many of these elements are pruned, according to the masks.
        has_order: whether the order of scores was compared; False: it was pruned in rounds, and
            what the last one ranked is gone.
    """

    problems: tuple[str, ...]
    num_bytes: int
    num_elements: int
    num_pruned: int
    has_order: bool = True

    @property
    def is_good(self) -> bool:
        return not self.problems


def verify(
    destination: str | Path,
    source: str | Path,
    *,
    scores: str | Path | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> VerifyReport:
    """Check a pruned checkpoint against its source.

    The destination has to have the files that :func:`prune` writes, in full, and no others. Every
    mask has to be the one that the recipe leads to, ties included; every byte outside of the pruned
    elements has to be that of the source, and every pruned element +0. What the report and the
    model card say is not judged. Of a pruning in rounds the order of scores is not compared; see
    [Note: rounds].

    Args:
        destination: a folder that :func:`prune` wrote, with masks; visible to every rank.
        source: the checkpoint that it was made from, or a copy of it.
        scores: the scores that it was ranked by, or a copy of them, if they were given.
        progress: called about twice a second, with what all ranks have done.

    Returns:
        The report, the same on every rank, whatever their number.

    Raises:
        CheckpointError: a folder cannot be read, the destination has no masks or no report, or it
            was made from another source.
        SelectionError, NaNError: the recipe of the result does not fit the source.
        RanksError: the ranks were called with different folders, or one was lost.
        Each is raised on every rank that is left.

    Cost: the reads that :func:`prune` needs to rank the source, and one read of source, result and
    masks; memory as for pruning. Communication as for pruning.
    """
    team, folder = Team(world(), progress), Path(destination)
    report, made = team.run(lambda: _plan_again(folder, source, scores))
    team.compare([("destination", ascii(os.path.abspath(folder))), ("plan", made.digest)])
    ranked, checkpoint = RankedTensors(made, team), made.checkpoint
    problems, masks, files = team.run(lambda: _check_files(folder, made, report))
    has_order = not report.inputs.get("update", {}).get("rounds")
    if has_order:
        ranked.find_cuts()
    pieces = ranked.pieces if has_order or masks is None else partial(pruning.masked_pieces, masks)
    comparison = _Comparison(folder, made, report, masks, pieces)
    comparison.count = partial(team.count, "verify")
    sizes = {name: file.size for name, file in files.items()}
    team.begin("verify", sum(sizes.values()))
    team.each(sizes, lambda name: comparison.compare(files[name]))
    team.run(lambda: pruning.check_unchanged(checkpoint.all_files))
    of_ranks = team.share([comparison.num_bytes, comparison.num_pruned, comparison.problems()])
    num_bytes, num_pruned = (sum(found[i] for found in of_ranks) for i in (0, 1))
    problems += sorted(text for found in of_ranks for text in found[2])
    is_whole = masks is not None and all(file.name in files for file in checkpoint.files)
    if is_whole and num_pruned != made.num_to_prune:
        problems.append(
            f"{num_pruned} elements are pruned in all; the recipe asks for {made.num_to_prune}."
        )
    return VerifyReport(tuple(problems), num_bytes, made.num_elements, num_pruned, has_order)


def _plan_again(folder: Path, source: str | Path, scores: str | Path | None) -> tuple[Report, Plan]:
    """The report of a result, and the plan that made it."""
    report = read_report(folder)
    recipe = recipe_of(report, folder)
    if recipe.scores is None and scores is not None:
        raise CheckpointError(f"{folder} was not ranked by stored scores; leave --scores out.")
    if recipe.scores is not None and scores is None:
        raise CheckpointError(
            f"{folder} was ranked by stored scores; expected --scores FOLDER, which has them or a "
            "copy of them. `distprune prune --text` keeps those that it makes with --keep-scores."
        )
    paths = {"statistics": str(folder / STATISTICS_FILE), "scores": str(scores)}
    changes = {key: path for key, path in paths.items() if getattr(recipe, key) is not None}
    return report, plan(source, recipe.model_copy(update=changes))


def _check_files(
    folder: Path, plan: Plan, report: Report
) -> tuple[list[str], MaskFile | None, dict[str, SourceFile]]:
    """What is wrong with the names and sizes of files; the masks, and files that can be compared.

    Raises:
        CheckpointError: the result was made from another source.
    """
    if identity_of(plan.checkpoint) != report.source:
        raise CheckpointError(
            f"{folder} was not made from {plan.checkpoint.folder}: the sizes or headers of the "
            "weight files were others."
        )
    pruned = [entry for entry, _, reason in plan.verdicts if not reason]
    header = mask_header({entry.name: entry.shape for entry in pruned}, is_of_checkpoint=True)
    size = len(header) + sum(memory.num_bytes_of(entry.numel) for entry in pruned)
    files = {file.name: file for file in (*plan.checkpoint.files, *plan.copied)}
    sizes: dict[str, int | None] = {name: file.size for name, file in files.items()}
    small = [REPORT_FILE, pruning.RECIPE_FILE, *[CARD_FILE] * plan.recipe.card]
    small += [] if plan.statistics is None else [STATISTICS_FILE]
    small += report.inputs.get("update", {}).get("files", [])
    sizes |= {MASK_FILE: size, **dict.fromkeys(small)}
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    found = {str(path.relative_to(folder)): path for path in paths}
    wrong = dict.fromkeys(found.keys() - sizes.keys(), "was not written by prune")
    for name, expected in sizes.items():
        if name not in found or not found[name].is_file():
            wrong[name] = "is missing, or is no regular file"
        elif expected not in (None, has := found[name].stat().st_size):
            wrong[name] = f"has {has} bytes; expected {expected}"
    if MASK_FILE not in wrong:
        with found[MASK_FILE].open("rb") as file:
            if file.read(len(header)) != header:
                wrong[MASK_FILE] = "has another header than prune writes for these tensors"
    problems = [f"{printable(name)} {text}." for name, text in sorted(wrong.items())]
    masks = None if MASK_FILE in wrong else open_masks(folder)
    # Without masks, nothing says what the weights should be.
    can_be = {n: f for n, f in files.items() if n not in wrong and (masks or not f.tensors)}
    return problems, masks, can_be


class _Comparison:
    """Files of a result beside what they have to be.

    Args:
        folder: of the result.
        plan: that makes it.
        report: of the result.
        masks: of the result; None: no weights are compared.
        pieces: which elements have to be kept.

    Attributes:
        count: called with numbers of bytes that were compared.
        num_bytes: that were compared.
        num_pruned: elements, by the masks of the result.
    """

    count: Callable[[int], None]

    def __init__(
        self, folder: Path, plan: Plan, report: Report, masks: MaskFile | None, pieces: Pieces
    ) -> None:
        self.num_bytes = self.num_pruned = 0
        self._folder, self._masks, self._pieces = folder, masks, pieces
        self._names = {tensor.entry.name for tensor in plan.tensors}
        # Of the tensors whose kept weights were moved.
        self._crc32 = {t.name: t.crc32 for t in report.tensors if t.crc32 is not None}
        # By name and by what is wrong: how many elements or bytes, and the first of them.
        self._wrong: dict[tuple[str, str], tuple[int, int]] = {}

    def problems(self) -> list[str]:
        """What differs, as sentences."""
        return [
            f"{printable(name)}: {count} {what}; the first is number {first}."
            for (name, what), (count, first) in self._wrong.items()
        ]

    def compare(self, file: SourceFile) -> None:
        """Compare a file with what ``prune`` makes of that of the source."""
        counts: Counts = defaultdict(Counter)
        path = str(self._folder / file.name)
        for part in pruning.parts_of(file, self._names, self._pieces, counts):
            if isinstance(part, range):
                both = (pieces_of(each, part.start, part.stop) for each in (file.path, path))
                at = part.start
                for ours, theirs in zip(*both, strict=True):
                    differ = np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)
                    self._add(file.name, _COPIED, differ, at)
                    at += len(ours)
                    self._done(len(ours))
            else:
                self._compare_piece(path, *part, counts)
        for name, crc32 in counts["crc32"].items():
            self._add(name, _MOVED, np.array([crc32 != self._crc32[name]]), 0)

    def _compare_piece(self, path: str, entry: TensorEntry, piece: Piece, counts: Counts) -> None:
        """The mask is that of the recipe; the result is the source times the mask, with +0."""
        (first, bits, keep), name, masks = piece, entry.name, self._masks
        assert masks is not None
        packed = np.empty(memory.num_bytes_of(len(keep)), np.uint8)
        read_into(masks.file.path, [(masks.starts[name] + first // 8, packed.data)])
        kept = memory.unpack(packed, 0, len(keep))
        written = np.empty_like(bits)
        read_into(path, [(entry.start + first * bits.itemsize, written.data.cast("B"))])
        if name in self._crc32:  # the source does not have what was kept
            bits = written
            pruning.add_checksum(counts, name, written)
        self._add(name, _VALUES, written != bits * kept, first)
        wrong = packed ^ memory.pack(keep)
        self._add(name, _ORDER, np.unpackbits(wrong, bitorder="little"), first)
        self.num_pruned += len(kept) - int(np.count_nonzero(kept))
        self._done(bits.nbytes)

    def _done(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.count(num_bytes)

    def _add(self, name: str, what: str, are_wrong: np.ndarray, first: int) -> None:
        places = np.flatnonzero(are_wrong)
        if len(places):
            count, at = self._wrong.get((name, what), (0, first + int(places[0])))
            self._wrong[name, what] = count + len(places), at


_COPIED = "bytes differ from the source, and belong to no pruned tensor"
_VALUES = "elements are neither kept as they were nor pruned as the mask says"
_ORDER = "bits of its mask are not those that the order of scores leads to"
_MOVED = "checksum of kept weights is not that of what was written"


@dataclass
class TensorFacts:
    """Counts of the numbers of one tensor.

    Attributes:
        entry: the tensor.
        num_zero: +0 and -0; None for other dtypes than floats of 16 bits and more.
        num_nan, num_inf: NaN and infinities.
        num_groups: by pattern (n, m), the groups of m neighbours along the input dimension. A
            pattern is missing if m does not divide the inputs or their dimension is not known.
        num_kept: by pattern, the groups with at most n nonzero numbers.
    """

    entry: TensorEntry
    num_zero: int | None = 0
    num_nan: int = 0
    num_inf: int = 0
    num_groups: dict[tuple[int, int], int] = field(default_factory=dict)
    num_kept: dict[tuple[int, int], int] = field(default_factory=dict)


def inspect(
    checkpoint: Checkpoint,
    patterns: Sequence[tuple[int, int]] = ((2, 4),),
    input_dims: Mapping[str, Sequence[int]] | None = None,
    *,
    progress: Callable[[Progress], object] | None = None,
) -> Iterator[TensorFacts]:
    """Count the numbers of every tensor, in the checkpoint's order.

    Args:
        checkpoint: from ``open_checkpoint``.
        patterns: N:M patterns to count.
        input_dims: as in a recipe, for tensors whose input dimension is not known.
        progress: called about twice a second.

    Raises:
        CheckpointError: a file cannot be read, or has become shorter.
        SelectionError: ``input_dims`` do not fit.

    Cost: one read of these tensors; the memory of a slab, or of a few rows of a matrix whose groups
    span several rows.
    """
    layouts, team = Layouts(checkpoint, input_dims), Team(world(), progress)
    team.begin("read", checkpoint.num_bytes)
    for entry in checkpoint.tensors:
        facts = TensorFacts(entry)
        form = PLAIN_FLOATS.get(entry.dtype)
        if form is None:
            facts.num_zero = None
            team.count("read", entry.nbytes)
            yield facts
            continue
        try:
            layout = layouts.of(entry)
        except SelectionError:
            if entry.name in layouts.given:
                raise
            layout = Layout(1, 1)  # it is not known
        fitting = [(n, m) for n, m in patterns if entry.numel and layout.inputs % m == 0]
        for n, m in fitting:
            facts.num_groups[n, m], facts.num_kept[n, m] = entry.numel // m, 0
        # Slabs hold whole groups: the lengths of groups divide the inputs, as does their lcm.
        block = layout.stride * math.lcm(*(m for _, m in fitting)) if fitting else 1
        num_zero = 0
        for raw in pieces_of(entry.path, entry.start, entry.stop, block * form.num_bits // 8):
            team.count("read", len(raw))
            magnitudes = form.magnitudes(np.frombuffer(raw, np.uint8))
            num_zero += int(np.count_nonzero(magnitudes == 0))
            facts.num_inf += int(np.count_nonzero(magnitudes == form.bits(form.inf)))
            facts.num_nan += int(np.count_nonzero(magnitudes > form.bits(form.inf)))
            for n, m in fitting:
                groups = (magnitudes != 0).reshape(-1, m, layout.stride)
                num_kept = np.count_nonzero(groups.sum(1, dtype=np.int32) <= n)
                facts.num_kept[n, m] += int(num_kept)
        facts.num_zero = num_zero
        yield facts


@dataclass(frozen=True)
class TensorDifference:
    """Two tensors of one name, element by element.

    Attributes:
        name: the name of both.
        numel: elements of each; 0 if there is a ``problem``.
        num_differing: elements whose bits differ.
        num_zero_in_both: elements that are +0 or -0 in both.
        num_zero_in_first, num_zero_in_second: elements that are zero in that one only.
        problem: why they cannot be compared: another shape or dtype, or one is missing.
    """

    name: str
    numel: int = 0
    num_differing: int = 0
    num_zero_in_both: int = 0
    num_zero_in_first: int = 0
    num_zero_in_second: int = 0
    problem: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the tensors are equal bit for bit."""
        return not self.problem and not self.num_differing


def compare(
    first: Checkpoint, second: Checkpoint, *, progress: Callable[[Progress], object] | None = None
) -> Iterator[TensorDifference]:
    """Compare all tensors by name, in the order of the first checkpoint.

    Tensors may be in other files and in another order. Zeros are counted in plain floats only.

    Args:
        first, second: from ``open_checkpoint``.
        progress: called about twice a second.

    Raises:
        CheckpointError: a file cannot be read, or has become shorter.

    Cost: one read of each; the memory of a slab.
    """
    team = Team(world(), progress)
    team.begin("read", first.num_bytes + second.num_bytes)
    ours = {entry.name: entry for entry in first.tensors}
    theirs = {entry.name: entry for entry in second.tensors}
    for name in ours | theirs:
        both = [entries[name] for entries in (ours, theirs) if name in entries]
        kinds = {f"{entry.dtype} {list(entry.shape)}": None for entry in both}
        if len(both) == 1:
            where = "first" if name in ours else "second"
            yield TensorDifference(name, problem=f"only in the {where}")
        elif len(kinds) == 2:
            yield TensorDifference(name, problem="; ".join(kinds))
        else:
            size, num_bytes = both[0].numel, both[0].nbytes
            itemsize = num_bytes // size if size and num_bytes % size == 0 else 1
            counts = np.zeros(4, dtype=np.int64)
            form = PLAIN_FLOATS.get(both[0].dtype)
            pieces = (pieces_of(e.path, e.start, e.stop, itemsize) for e in both)
            for raw in zip(*pieces, strict=True):
                one, two = (np.frombuffer(each, np.uint8) for each in raw)
                team.count("read", 2 * len(one))
                counts[0] += np.count_nonzero((one != two).reshape(-1, itemsize).any(1))
                if form is not None:
                    a, b = form.magnitudes(one) == 0, form.magnitudes(two) == 0
                    counts[1:] += [np.count_nonzero(zero) for zero in (a & b, a & ~b, b & ~a)]
            yield TensorDifference(name, size, *counts.tolist())
