"""Every change of a result is found by verify, and a healthy one passes wherever it lies."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.checkpoints.mask_files import MASK_FILE, open_masks
from distprune.files.checks import side_by_side
from distprune.files.checks.claims import with_digest
from distprune.files.errors import CheckpointError
from distprune.files.formats.header import read_header
from distprune.files.ranking import streaming
from distprune.files.recipe import FileRecipe
from distprune.files.reports.report import REPORT_FILE, RUN_FILE
from distprune.files.reports.stored import read_report
from distprune.files.results import rewriting
from distprune.files.verifying import verify
from helpers import tiny_checkpoints
from helpers.small_work_units import small_units

RECIPE_FILE = "distprune/recipe.yaml"
RECIPES = {
    "global": FileRecipe(0.5),
    "layer": FileRecipe(0.5, "layer"),
    "row": FileRecipe(0.4, "row"),
    "pattern": FileRecipe(pattern="2:4"),
    "random": FileRecipe(0.5, score="random", seed=3),
    "random rows": FileRecipe(0.5, "row", score="random"),
    "nothing": FileRecipe(0.0),
    "everything": FileRecipe(1.0),
    "chosen": FileRecipe(0.3, include=("re:.*[abc].weight",), exclude=("b.*",), nan="keep"),
}


def tensors(dtypes):
    g = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 12), "b": (12, 5), "c": (3, 20), "d": (5, 12)}
    if len(dtypes) == 1:
        shapes["b"] = (15, 4)
    made = {}
    for (name, shape), dtype in zip(shapes.items(), dtypes * 4, strict=False):
        values = (torch.randn(shape, generator=g) * 3).round()
        made[f"{name}.weight"] = (values + values.sign() * 0.25).to(dtype)
    made["norm.weight"] = torch.ones(7)
    return made


@pytest.fixture(scope="module", params=RECIPES)
def made(request, tmp_path_factory):
    """(source, destination), made of many small pieces."""
    folder = tmp_path_factory.mktemp("mutations")
    with pytest.MonkeyPatch.context() as patch, small_units(num_elements=40):
        for module in (streaming, rewriting, side_by_side):
            patch.setattr(module, "CHUNK", 24)
            patch.setattr(module, "MAX_IN_MEMORY", 50)
        recipe = RECIPES[request.param]
        dtypes = [torch.bfloat16]
        if request.param in ("global", "layer"):
            dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
        whole = tensors(dtypes)
        if recipe.pattern:
            whole |= {"b.weight": whole["a.weight"].flip(0)}
        if recipe.nan == "keep":
            whole["a.weight"].view(torch.int16)[2, 3:5] = torch.tensor([0x7FC0, -1]).short()
        names = list(whole)
        shards = ({n: whole[n] for n in names[:2]}, {n: whole[n] for n in names[2:]})
        source = tiny_checkpoints.save(folder / "source", *shards)
        (source / "nested" / "more").mkdir(parents=True)
        (source / "nested" / "more" / "modeling_custom.py").write_text("import torch\n")
        (source / "pytorch_model.bin").write_bytes(b"stale")
        pruning.prune(planning.plan(source, recipe), folder / "target")
        assert verify(folder / "target", source).problems == ()
        yield source, folder / "target"


@pytest.fixture
def found(made):
    """Change the target and say what verify finds; afterwards the target is as it was."""
    source, target = made
    kept = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}

    def find(change):
        change(target)
        try:
            problems = verify(target, source).problems
        except CheckpointError as error:
            problems = (str(error),)
        for path in sorted(target.rglob("*"), reverse=True):
            if path not in kept and not any(path in each.parents for each in kept):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for path, raw in kept.items():
            if path.is_dir():
                path.rmdir()
            if not path.is_file() or path.is_symlink() or path.read_bytes() != raw:
                path.unlink(missing_ok=True)
                path.write_bytes(raw)
        return problems

    yield find
    assert verify(target, source).problems == ()


# -- what the report says


def leaves(value, path=()):
    """Paths to everything in a JSON value that is no list or object, and to all lists."""
    if isinstance(value, dict | list):
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from leaves(each, (*path, key))
    else:
        yield path


def changed(value):
    """Values near this one, of its own type and of others."""
    if isinstance(value, bool):
        return [not value, 1, None]
    if isinstance(value, int):
        return [value + 1, value - 1, -value - 1, float(value), str(value), None, 2**63, not value]
    if isinstance(value, float):
        return [value + 1, -value - 1, value * 2 + 1, str(value), None, 0, 1e308]
    if isinstance(value, str):
        return [value + "x", value[1:] + "y", "", None, 0] if value else ["x", None]
    if isinstance(value, list):
        return [[*value, 1], value[:-1] if value else [0], None, {}, [*value, *value, None]]
    if isinstance(value, dict):
        return [{**value, "more": 1}, None, []]
    return [0, 0.5, "0x1", False, []]


def edited(raw, path, value, delete=False):
    values = json.loads(raw)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    if delete:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return (json.dumps(values, indent=1) + "\n").encode()


def test_any_value_of_the_report(found, made):
    raw = (made[1] / REPORT_FILE).read_bytes()
    values = json.loads(raw)
    num_edits = 0
    for path in leaves(values):
        if not path:
            continue
        value = values
        for key in path:
            value = value[key]
        edits = [edited(raw, path, each) for each in changed(value) if not same(each, value)]
        edits.append(edited(raw, path, None, delete=True))
        for edit in edits[:: 1 if len(path) < 3 else 3]:
            problems = found(lambda target, raw=edit: (target / REPORT_FILE).write_bytes(raw))
            assert problems and any("report.json" in each for each in problems), (path, problems)
            num_edits += 1
    assert num_edits > 150
    for edit in (raw + b" ", raw.replace(b"\n", b"", 1), raw[:-1]):
        (problem,) = found(lambda target, raw=edit: (target / REPORT_FILE).write_bytes(raw))
        assert "not the bytes that prune writes" in problem


def same(one, other):
    return type(one) is type(other) and one == other


def test_any_field_of_the_recipe(found, made):
    text = (made[1] / RECIPE_FILE).read_text()
    lines = text.splitlines(keepends=True)
    edits = [text + "# more\n", text + "masks: false\n", text[:-1], "", text.replace(":", ": ", 1)]
    for number, line in enumerate(lines):
        key = line.partition(":")[0]
        for new in ("", f"{key}: 7\n", f"{key}: null\n", f'{key}: "x"\n', f"#{line}"):
            if new != line:
                edits.append("".join([*lines[:number], new, *lines[number + 1 :]]))
    for edit in edits:
        problems = found(lambda target, edit=edit: (target / RECIPE_FILE).write_text(edit))
        assert len(problems) == 1 and "recipe.yaml" in problems[0], edit


def test_what_cannot_be_in_run_json(found, made):
    raw = (made[1] / RUN_FILE).read_bytes()
    edits = [
        edited(raw, (key,), value)
        for key, values in {
            "num_ranks": [0, -1, 2, "1", None],
            "seconds": [None, {"count": -1.0}, {"count": "1"}],
            "peak_rss_bytes": [[], [1, 2], [-1], ["1"], None],
            "num_bytes": [0, 1.5, None],
            "versions": [None, {"python": 3}],
            "schema": [2],
        }.items()
        for value in values
    ]
    edits += [edited(raw, (key,), None, delete=True) for key in json.loads(raw)]
    for edit in [*edits, raw + b" ", raw[:-1], b""]:
        problems = found(lambda target, edit=edit: (target / RUN_FILE).write_bytes(edit))
        assert problems and "run.json" in problems[0], edit


# -- bytes and files


def names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_any_change_of_any_file(found, made):
    for name in names(made[1]):
        raw = (made[1] / name).read_bytes()
        edits = [raw + b"\0", raw + raw, raw[:-1], raw[: len(raw) // 2], b""]
        for place in (0, 5, len(raw) // 2, len(raw) - 1):
            if name != RUN_FILE:
                edits.append(raw[:place] + bytes([raw[place] ^ 0x10]) + raw[place + 1 :])
        for edit in edits:
            problems = found(lambda target, n=name, raw=edit: (target / n).write_bytes(raw))
            assert problems, (name, len(edit))
            assert any(named(name, made, problem) for problem in problems), (name, problems)


def named(name, made, problem):
    """Whether a problem says which file, or which tensor of it."""
    if name.endswith(".safetensors") and not name.startswith("distprune"):
        tensors = read_header(made[0] / name).tensors
        return name in problem or any(tensor.name in problem for tensor in tensors)
    return name in problem or (name == MASK_FILE and "mask" in problem)


def test_a_file_that_is_gone_or_something_else(found, made):
    def replace(target, name, make):
        (target / name).unlink()
        make(target / name)

    for name in names(made[1]):
        for make in (
            lambda path: None,
            lambda path: path.mkdir(),
            os.mkfifo,
            lambda path: path.symlink_to(path),
            lambda path: path.symlink_to("/nowhere"),
        ):
            problems = found(lambda target, n=name, make=make: replace(target, n, make))
            assert problems and any(name in problem for problem in problems), name


@pytest.mark.parametrize(
    "name", ["more.py", ".hidden", "distprune/more.json", "nested/a.py", "new/a.py", "a\x1b[2J\n"]
)
def test_a_file_that_only_the_result_has(found, name):
    def add(target):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("import os\n")

    (problem,) = found(add)
    assert problem.startswith(name.partition("/a.py")[0] if name.startswith("new") else "") and (
        "that prune did not write" in problem and problem.isprintable()
    )


def test_a_folder_or_a_link_that_only_the_result_has(found):
    for add in (
        lambda target: (target / "empty").mkdir(),
        lambda target: (target / "distprune" / "work").mkdir(),
        lambda target: (target / "dangling").symlink_to("/nowhere"),
        lambda target: (target / "loop").symlink_to(target / "loop"),
        lambda target: (target / "up").symlink_to(target),
    ):
        (problem,) = found(add)
        assert "that prune did not write" in problem


# -- masks and weights


class Bits:
    """The masks and values of a result, to be changed one by one."""

    def __init__(self, source, target):
        self.source, self.target = source, target
        self.masks = open_masks(target)
        self.entries = {
            t.name: t
            for path in sorted(source.glob("*.safetensors"))
            for t in read_header(path, path.name).tensors
            if t.name in self.masks.shapes
        }

    def keep(self, name):
        start, numel = self.masks.starts[name], self.entries[name].numel
        raw = Path(self.masks.path).read_bytes()[start:]
        bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little", count=numel)
        return bits.astype(bool)

    def flip(self, name, index, with_value=True):
        keep = not self.keep(name)[index]
        write(self.masks.path, self.masks.starts[name] + index // 8, xor=1 << index % 8)
        if with_value:
            self.put(name, index, self.original(name, index) if keep else None)

    def original(self, name, index):
        entry = self.entries[name]
        size = entry.nbytes // entry.numel
        start = entry.start + index * size
        return (self.source / entry.file).read_bytes()[start : start + size]

    def put(self, name, index, raw):
        entry = self.entries[name]
        size = entry.nbytes // entry.numel
        start = entry.start + index * size
        write(self.target / entry.file, start, raw=bytes(size) if raw is None else raw)

    def some(self, keep):
        """(name, index) of elements that are kept or not, at both ends and between."""
        for name in self.entries:
            where = np.flatnonzero(self.keep(name) == keep).tolist()
            for index in sorted({*where[:1], *where[len(where) // 2 :][:1], *where[-1:]}):
                yield name, index


def write(path, offset, xor=0, raw=None):
    data = bytearray(Path(path).read_bytes())
    raw = bytes([data[offset] ^ xor]) if raw is None else raw
    data[offset : offset + len(raw)] = raw
    Path(path).write_bytes(data)


def test_a_flipped_bit_of_a_mask(found, made):
    bits = Bits(*made)
    for keep in (True, False):
        for name, index in bits.some(keep):
            if any(bits.original(name, index)):
                problems = found(lambda _, n=name, i=index: bits.flip(n, i, with_value=False))
                assert any(name in problem for problem in problems)
            problems = found(lambda _, n=name, i=index: bits.flip(n, i))
            assert any("report.json" in problem for problem in problems)


def test_two_exchanged_bits_of_masks(found, made):
    bits = Bits(*made)
    num_pairs = 0
    for one in bits.some(True):
        for other in bits.some(False):

            def exchange(target, one=one, other=other):
                bits.flip(*one)
                bits.flip(*other)

            problems = found(exchange)
            assert any("order of scores" in p or "groups" in p for p in problems), problems
            num_pairs += 1
    is_mixed = any(bits.some(True)) and any(bits.some(False))
    assert num_pairs > 20 or not is_mixed


def test_two_exchanged_masks(found, made):
    bits = Bits(*made)
    pairs = [
        (one, other)
        for one in bits.entries
        for other in bits.entries
        if one < other
        and bits.entries[one].numel == bits.entries[other].numel
        and (bits.keep(one) != bits.keep(other)).any()
    ]
    for one, other in pairs:
        for with_value in (True, False):

            def exchange(target, one=one, other=other, with_value=with_value):
                for index in np.flatnonzero(bits.keep(one) != bits.keep(other)).tolist():
                    bits.flip(one, index, with_value)
                    bits.flip(other, index, with_value)

            assert found(exchange)


def test_a_changed_weight(found, made):
    bits = Bits(*made)
    for name, index in bits.some(False):
        size = len(bits.original(name, index))
        negative_zero = bytes(size - 1) + b"\x80"
        for value in (bits.original(name, index), negative_zero, b"\x01" * size):
            if any(value):
                (problem,) = found(lambda _, v=value, n=name, i=index: bits.put(n, i, v))
                assert problem.startswith(name) and f"number {index}." in problem
    for name, index in bits.some(True):
        raw = bits.original(name, index)
        for value in (bytes(len(raw)), raw[:-1] + bytes([raw[-1] ^ 0x80])):
            if value != raw:
                (problem,) = found(lambda _, v=value, n=name, i=index: bits.put(n, i, v))
                assert problem.startswith(name) and f"number {index}." in problem


def test_bits_behind_the_end_of_a_mask(found, made):
    bits = Bits(*made)
    odd = [name for name, entry in bits.entries.items() if entry.numel % 8]
    assert odd
    for name in odd:
        for bit in range(bits.entries[name].numel % 8, 8):
            last = bits.masks.starts[name] + bits.entries[name].numel // 8
            (problem,) = found(lambda _, at=last, bit=bit: write(bits.masks.path, at, xor=1 << bit))
            assert problem.startswith(name) and "belong to no element" in problem


def test_any_byte_of_the_header_of_the_masks(found, made):
    start = min(open_masks(made[1]).starts.values())
    for offset in range(0, start, 7):
        problems = found(lambda target, at=offset: write(target / MASK_FILE, at, xor=1))
        assert any("masks.safetensors: its header" in problem for problem in problems)


# -- everything at once


@pytest.mark.parametrize("claimed", ["global", "layer", "row", "pattern"])
def test_a_random_pruning_that_says_it_is_one_by_magnitude(tmp_path, claimed):
    """Masks, weights, report and recipe fit together, and the report says nothing of thresholds."""
    source = tiny_checkpoints.save(tmp_path / "source", tensors([torch.bfloat16]))
    told = RECIPES[claimed]
    fields = {"pattern": told.pattern} if told.pattern else {
        "sparsity": told.sparsity, "scope": told.scope
    }  # fmt: skip
    done = FileRecipe(**fields, score="random", seed=1)
    pruning.prune(planning.plan(source, done), tmp_path / "target")
    assert verify(tmp_path / "target", source).is_good
    report = read_report(tmp_path / "target")
    values = json.loads(report.result_json())
    values["recipe"] |= {"score": "magnitude", "seed": None}
    plan = planning.plan(source, told)
    values["digest"] = with_digest(report, report, plan).digest
    nulls = dict.fromkeys(("threshold", "threshold_bits", "num_ties", "num_ties_pruned"))
    (tmp_path / "target" / RECIPE_FILE).write_text(told.to_yaml())
    for more in (nulls, {}):
        text = json.dumps(values | more, indent=1) + "\n"
        (tmp_path / "target" / REPORT_FILE).write_text(text)
        problems = verify(tmp_path / "target", source).problems
        assert any("order of scores" in problem for problem in problems)


def test_the_digest_covers_the_recipe_and_the_times(found, made):
    """Where a field has no effect on these weights, the digest still tells."""
    raw = (made[1] / REPORT_FILE).read_bytes()
    recipe = json.loads(raw)["recipe"]
    other = "keep" if recipe["nan"] == "error" else "error"
    edit = edited(raw, ("recipe", "nan"), other)

    def change(target):
        (target / REPORT_FILE).write_bytes(edit)
        (target / RECIPE_FILE).write_text(FileRecipe(**json.loads(edit)["recipe"]).to_yaml())

    problems = found(change)
    assert any("digest is" in problem for problem in problems)
    # Only NaN themselves tell otherwise.
    assert len(problems) == 1 + any("are NaN, which the recipe refuses" in p for p in problems)


# -- healthy ones


def test_a_healthy_result_passes_wherever_it_and_its_source_lie(made, tmp_path):
    source, target = made
    subprocess.run(["cp", "-r", source, tmp_path / "copy"], check=True)
    subprocess.run(["cp", "-a", source, tmp_path / "exact copy"], check=True)
    subprocess.run(["cp", "-r", target, tmp_path / "result"], check=True)
    subprocess.run(["cp", "-a", target, tmp_path / "exact result"], check=True)
    assert read_times(tmp_path / "copy") != read_times(source)
    assert read_times(tmp_path / "exact copy") == read_times(source)
    # As the cache of a hub has them: links to files, and the folder itself behind a link.
    for folder in ("copy", "result"):
        linked = tmp_path / f"linked {folder}"
        for path in [p for p in (tmp_path / folder).rglob("*") if p.is_file()]:
            blob = tmp_path / "blobs" / f"{folder}-{path.name}"
            blob.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, blob)
            link = linked / path.relative_to(tmp_path / folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
        (tmp_path / f"way to {folder}").symlink_to(linked)
    for one in (source, "copy", "exact copy", "linked copy", "way to copy"):
        for other in (target, "result", "exact result", "linked result", "way to result"):
            assert verify(tmp_path / other, tmp_path / one).problems == (), (one, other)


def read_times(folder):
    return [path.stat().st_mtime_ns for path in sorted(folder.glob("*.safetensors"))]
