"""verify finds every change of a result, and nothing in a healthy one, on any number of ranks."""

import json
import os
import subprocess
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from distprune.files import planning, pruning, verifying
from distprune.files.checkpoint import read_header
from distprune.files.disk import REPORT_FILE
from distprune.files.errors import CheckpointError, FilesError
from distprune.files.mask_files import MASK_FILE, open_masks
from distprune.files.pruning import RECIPE_FILE
from distprune.files.verifying import verify
from distprune.ranks.collectives import world
from distprune.testing import run_ranks
from helpers.recipes import raw_recipe
from helpers.sampling import THOROUGH, every
from helpers.small_chunks import small_chunks
from helpers.tiny_checkpoints import save, save_in_files, tree_digest

RECIPES = {
    "global": raw_recipe(0.5),
    "normalised": raw_recipe(0.5, normalize="rms"),
    "layer": raw_recipe(0.5, "layer"),
    "row": raw_recipe(0.4, "row"),
    "pattern": raw_recipe(pattern="2:4"),
    "random": raw_recipe(0.5, score="random", seed=3),
    "random rows": raw_recipe(0.5, "row", score="random"),
    "nothing": raw_recipe(0.0),
    "everything": raw_recipe(1.0),
    "chosen": raw_recipe(0.3, include=("re:.*[abc].weight",), exclude=("b.*",)),
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


THE_ORDER = "bits of its mask are not those that the order of scores leads to; the first is number"
BY_DEFAULT = ("global", "pattern", "chosen")


@pytest.fixture(scope="module", params=RECIPES if THOROUGH else BY_DEFAULT)
def made(request, tmp_path_factory):
    """(source, destination), made of many small pieces."""
    folder = tmp_path_factory.mktemp("mutations")
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, 24)
        recipe = RECIPES[request.param]
        dtypes = [torch.bfloat16]
        if request.param in ("global", "normalised", "layer"):
            dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
        whole = tensors(dtypes)
        if recipe.pattern:
            whole |= {"b.weight": whole["a.weight"].flip(0)}
        source = save_in_files(folder / "source", whole, 2)
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


@pytest.fixture
def turn(request):
    """The number of the recipe: each takes other changes, and all take all of them."""
    return list(RECIPES).index(request.node.callspec.params["made"])


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
        raw = Path(self.masks.file.path).read_bytes()[start:]
        bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little", count=numel)
        return bits.astype(bool)

    def flip(self, name, index, with_value=True):
        keep = not self.keep(name)[index]
        write(self.masks.file.path, self.masks.starts[name] + index // 8, xor=1 << index % 8)
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


# Masks and weights


def test_a_flipped_bit_of_a_mask(found, made, turn):
    bits = Bits(*made)
    for keep in (True, False):
        for name, index in every(2, bits.some(keep), turn):
            if any(bits.original(name, index)):
                problems = found(lambda _, n=name, i=index: bits.flip(n, i, with_value=False))
                assert any(name in problem for problem in problems)
            wrong, count = found(lambda _, n=name, i=index: bits.flip(n, i))
            assert wrong == f"{name}: 1 {THE_ORDER} {index}." and "are pruned in all" in count


def test_a_changed_weight(found, made, turn):
    bits = Bits(*made)
    for keep in (False, True):
        for name, index in every(2, bits.some(keep), turn):
            raw = bits.original(name, index)
            size = len(raw)
            if keep:
                values = (bytes(size), raw[:-1] + bytes([raw[-1] ^ 0x80]))
            else:  # the values of the source, -0 and a denormal
                values = (raw, bytes(size - 1) + b"\x80", b"\x01" * size)
            for value in values:
                if value != (raw if keep else bytes(size)):
                    (problem,) = found(lambda _, v=value, n=name, i=index: bits.put(n, i, v))
                    assert problem.startswith(name) and f"number {index}." in problem


def test_bits_behind_the_end_of_a_mask(found, made):
    bits = Bits(*made)
    odd = [name for name, entry in bits.entries.items() if entry.numel % 8]
    assert odd
    for name in odd:
        for bit in {bits.entries[name].numel % 8, 7}:
            last = bits.masks.starts[name] + bits.entries[name].numel // 8
            path, change = bits.masks.file.path, 1 << bit
            (problem,) = found(lambda _, at=last, xor=change, path=path: write(path, at, xor=xor))
            assert problem.startswith(f"{name}: 1 {THE_ORDER}")


# Files


def names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_any_change_of_any_file(found, made, turn):
    for name in set(names(made[1])) - {REPORT_FILE, RECIPE_FILE, "README.md"}:  # for people
        raw = (made[1] / name).read_bytes()
        edits = [raw + b"\0", raw[:-1], b""]
        for place in (0, len(raw) // 2, len(raw) - 1):
            edits.append(raw[:place] + bytes([raw[place] ^ 0x10]) + raw[place + 1 :])
        for edit in every(3, edits, turn):
            problems = found(lambda target, n=name, raw=edit: (target / n).write_bytes(raw))
            assert any(named(name, made, problem) for problem in problems), (name, problems)


def named(name, made, problem):
    """Whether a problem says which file, or which tensor of it."""
    if name.endswith(".safetensors") and not name.startswith("distprune"):
        entries = read_header(made[0] / name).tensors
        return name in problem or any(entry.name in problem for entry in entries)
    return name in problem or (name == MASK_FILE and "mask" in problem)


def test_a_file_that_is_gone_or_something_else(found, made):
    def replace(target, name, make):
        (target / name).unlink()
        make(target / name)

    ways = (
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/nowhere"),
    )
    for number, name in enumerate(names(made[1])):
        for make in (lambda path: None, *every(4, ways, number)):
            problems = found(lambda target, n=name, make=make: replace(target, n, make))
            assert problems and any(name in problem for problem in problems), name


def test_a_file_that_only_the_result_has(found):
    for name in ("more.py", ".hidden", "distprune/more.json", "nested/a.py", "new/a.py", "a\x1b\n"):

        def add(target, name=name):
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_text("import os\n")

        (problem,) = found(add)
        assert problem.startswith("new") or not name.startswith("new")
        assert "was not written by prune" in problem and problem.isprintable()


@pytest.mark.parametrize("made", ["global"], indirect=True)
def test_refuses_what_does_not_belong_together(found, made, tmp_path):
    other = save(tmp_path / "other", {"a.weight": torch.ones(4, 4)})
    with pytest.raises(CheckpointError, match="was not made from"):
        verify(made[1], other)
    with pytest.raises(CheckpointError, match="has no report"):
        verify(other, made[0])
    text = json.dumps({"schema": 2})
    (problem,) = found(lambda target: (target / REPORT_FILE).write_text(text))
    assert "no report of distprune" in problem


# Ranks


WAYS = [
    {"sparsity": 0.5},
    {"sparsity": 0.5, "scope": "layer"},
    {"sparsity": 0.5, "scope": "row"},
    {"sparsity": 0.5, "score": "random"},
]


@pytest.fixture
def make(tmp_path):
    def make(way, name="target"):
        source = tmp_path / f"source of {name}"
        g = torch.Generator().manual_seed(0)
        weights = {
            f"layers.{n}.weight": (torch.randn(6, 20, generator=g) * 2).round().bfloat16() + 0.25
            for n in range(9)
        }
        weights["norm.weight"] = torch.ones(9)
        save_in_files(source, weights, 4)
        pruning.prune(planning.plan(source, raw_recipe(**way)), tmp_path / name)
        return source, tmp_path / name

    return make


def found_here(target, source):
    """On every rank: how verify ends."""
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, 24)
        try:
            found = verify(target, source)
            return found.problems, found.num_bytes, found.num_pruned
        except FilesError as error:
            return type(error).__name__, str(error)


def damage(source, target):
    """Bytes that differ at the ends of units and between them, in weights, masks and copies."""
    for path in target.glob("*.safetensors"):
        for tensor in read_header(path).tensors:
            for at in (tensor.start, tensor.start + 88, tensor.stop - 1):
                if at < tensor.stop:
                    write(path, at, xor=0x41)
    masks = open_masks(target)
    for name in ("layers.1.weight", "layers.7.weight"):
        write(target / MASK_FILE, masks.starts[name], xor=3)
    (target / "more").write_text("x")
    text = (target / "config.json").read_text()
    (target / "config.json").write_text(text.replace("tiny", "tinx"))


@pytest.mark.parametrize("way", every(2, WAYS), ids=lambda way: "-".join(map(str, way.values())))
def test_any_number_of_ranks_finds_the_same(make, way):
    source, target = make(way)
    healthy = verify(target, source)
    assert healthy.is_good and healthy.num_pruned == healthy.num_elements // 2 == 540
    size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    assert healthy.num_bytes == size
    for world_size in (1, 3):
        for found in run_ranks(found_here, world_size, target, source):
            assert found == (healthy.problems, healthy.num_bytes, healthy.num_pruned)
    damage(source, target)
    damaged = verify(target, source)
    assert len(damaged.problems) > 12
    for world_size in (1, 2, 3):
        for found in run_ranks(found_here, world_size, target, source):
            assert found == (damaged.problems, damaged.num_bytes, damaged.num_pruned)


def different_folders(targets, source):
    return found_here(targets[world().index], source)


def broken_on_one(target, source):
    """One rank cannot read a file in the middle."""
    if world().index == 1:

        def fail(*_):
            raise CheckpointError("a file went away")

        with mock.patch.object(verifying, "read_into", fail):
            return found_here(target, source)
    return found_here(target, source)


def test_every_rank_raises_or_none_does(make, tmp_path):
    source, target = make({"sparsity": 0.5})
    os.symlink(target, tmp_path / "other name")
    targets = [target, tmp_path / "other name"]
    for kind, text in run_ranks(different_folders, 2, targets, source):
        assert kind == "RanksError" and "other name" in text
    for kind, text in run_ranks(broken_on_one, 2, target, source):
        assert (kind, text) == ("CheckpointError", "on rank 1: a file went away")
    (target / REPORT_FILE).write_text("{")
    for kind, text in run_ranks(found_here, 2, target, source):
        assert kind == "CheckpointError" and "report.json is not valid JSON" in text


@pytest.mark.parametrize("made", ["global"], indirect=True)
def test_a_healthy_result_passes_wherever_it_and_its_source_lie(made, tmp_path):
    for folder, name in zip(made, ("source", "result"), strict=True):
        subprocess.run(["cp", "-r", folder, tmp_path / name], check=True)
        (tmp_path / f"way to {name}").symlink_to(tmp_path / name)
    for one in (made[0], tmp_path / "source", tmp_path / "way to source"):
        for other in (made[1], tmp_path / "result", tmp_path / "way to result"):
            assert verify(other, one).problems == (), (one, other)


def test_a_name_of_a_file_that_no_json_can_hold(tmp_path):
    """Names that are not UTF-8 come through the report."""
    source = save(tmp_path / "source", {"a.weight": torch.randn(4, 6)})
    (source / "caf\udce9 \x1b[2J").write_text("x")
    pruning.prune(planning.plan(source, raw_recipe(0.5)), tmp_path / "target")
    assert verify(tmp_path / "target", source).is_good
    (tmp_path / "target" / "caf\udce9 \x1b[2J").write_text("xx")
    (problem,) = verify(tmp_path / "target", source).problems
    assert problem == r"caf\udce9 \x1b[2J has 2 bytes; expected 1."


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_threshold_that_json_has_no_number_for(tmp_path, scope):
    """The largest magnitude that went is infinite: the report stays JSON for every program."""
    values = torch.tensor([[1.0, float("inf")], [float("-inf"), 2.0]])
    source = save(tmp_path / "source", {"a.weight": values})
    report = pruning.prune(planning.plan(source, raw_recipe(1.0, scope)), tmp_path / "target")
    assert report.groups[0].threshold is None and report.tensors[0].threshold is None

    def refuse(constant):
        raise AssertionError(constant)

    raw = (tmp_path / "target" / REPORT_FILE).read_text()
    bits = json.loads(raw, parse_constant=refuse)["groups"][0]["threshold"]
    assert bits is None
    assert verify(tmp_path / "target", source).is_good


# A result has the same bytes on any number of ranks.


RUN = ("distprune/report.json",)
MORE = {
    "limits": raw_recipe(0.5, min_sparsity=0.4, max_sparsity=0.6),
    "limits of rms": raw_recipe(0.5, normalize="rms", max_sparsity=0.8),
    "erk": raw_recipe(0.5, budget="erk"),
    "groups": raw_recipe(
        groups=(
            raw_recipe(0.5, include=("a*",), normalize="l2"),
            raw_recipe(0.25, "row", include=("b*",)),
            raw_recipe(0.75, include=("[cd]*",), score="random"),
        ),
        seed=5,
    ),
}


def digests_here(source, recipes, folder):
    """On every rank: the digest of each result, after a comparison with its source."""
    digests = []
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, 24)
        for number, recipe in enumerate(recipes):
            target = folder / str(number)
            pruning.prune(planning.plan(source, recipe), target)
            assert verifying.verify(target, source).problems == ()
            digests.append(tree_digest(target, RUN))
    return digests


def test_any_number_of_ranks_writes_the_same_bytes(tmp_path):
    """Those of one rank are compared with the oracle where each kind of recipe is tested."""
    whole = tensors([torch.bfloat16])
    whole["b.weight"] = whole["a.weight"].flip(0)
    parts = [{name: tensor} for name, tensor in whole.items()]
    source = save(tmp_path / "source", *parts)
    recipes, found = every(2, [*RECIPES.values(), *MORE.values()]), []
    for world_size in (1, 2, 3):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        found += run_ranks(digests_here, world_size, source, recipes, folder)
    assert all(digests == found[0] for digests in found)
