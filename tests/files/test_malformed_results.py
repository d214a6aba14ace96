"""A tampered report, recipe or mask file is one clear error, whatever is in it."""

import json
import random

import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.checkpoints.mask_files import MASK_FILE
from distprune.files.errors import CheckpointError
from distprune.files.recipe import FileRecipe
from distprune.files.reports.report import REPORT_FILE, RUN_FILE, parse_report, read_report
from distprune.files.verifying import verify
from helpers import tiny_checkpoints

RECIPE_FILE = "distprune/recipe.yaml"
NO_JSON = [
    b"", b"{", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"NaN", b"[" * 100_000, b'{"a":' * 100_000,
    b"{}" * 3, b"null", b"[]", b"7", b'"text"', b"9" * 10_000, b'{"schema": 1, "schema": 1}',
    b'{"schema": 1}', b'{"schema": 1, "status": "complete"}', b"\0" * 100, b'{"schema": true}',
    json.dumps({"schema": 1, "x": "\ud800"}).encode(),
]  # fmt: skip
ODD = [
    {"\x1b[2J": 1},
    None,
    True,
    0,
    -1,
    1.5,
    2**64,
    "",
    "x",
    "\ud800\x1b[2J",
    [],
    {},
    [[]],
    {"a": []},
    [None],
    0.0,
]
# Texts that json.dumps does not write, in the place of a value.
ODD_TEXTS = [
    "NaN",
    "-Infinity",
    "[" * 900 + "]" * 900,
    "Infinity",
    "1e999",
    "9" * 5000,
    "[" * 50_000 + "]" * 50_000,
    "-0",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("malformed")
    g = torch.Generator().manual_seed(0)
    tensors = {f"{n}.weight": torch.randn(4, 6, generator=g).bfloat16() for n in "ab"}
    source = tiny_checkpoints.save(folder / "source", tensors)
    pruning.prune(planning.plan(source, FileRecipe(0.5)), folder / "target")
    return source, folder / "target"


@pytest.fixture
def outcome(made):
    """Write a file and say what verify says: one text, however it ends."""
    source, target = made
    kept = {path: path.read_bytes() for path in (target / "distprune").iterdir()}

    def call(name, raw):
        (target / name).write_bytes(raw)
        try:
            return "; ".join(verify(target, source).problems)
        except CheckpointError as error:
            return str(error)

    yield call
    for path, raw in kept.items():
        path.write_bytes(raw)
    assert verify(target, source).is_good


@pytest.mark.parametrize("name", [REPORT_FILE, RUN_FILE, RECIPE_FILE, MASK_FILE])
def test_what_is_no_json_or_another_one(outcome, made, name):
    for raw in NO_JSON:
        text = outcome(name, raw)
        assert name in text and len(text) < 1500
        assert "\x1b" not in text
        if name in (REPORT_FILE, RUN_FILE):
            with pytest.raises(CheckpointError, match=name):
                read_report(made[1])


@pytest.mark.parametrize("name", [REPORT_FILE, RUN_FILE])
def test_values_of_other_types_anywhere(outcome, made, name):
    raw = (made[1] / name).read_bytes()
    num_tried = 0
    for path in places(json.loads(raw)):
        for odd in ODD:
            text = outcome(name, put(raw, path, json.dumps(odd)))
            assert name in text or is_plausible(name, path), (path, odd)
            assert "\x1b" not in text
            num_tried += 1
        for odd in ODD_TEXTS:
            text = outcome(name, put(raw, path, odd))
            assert name in text or is_plausible(name, path), (path, odd)
            assert len(text) < 3000
    assert num_tried > 100


def is_plausible(name, path):
    """Times, sizes and versions of a run may be any."""
    return name == RUN_FILE and path[0] in ("seconds", "peak_rss_bytes", "versions", "num_ranks")


def test_random_bytes_anywhere(outcome, made):
    generator = random.Random(0)
    for name in (REPORT_FILE, RUN_FILE, MASK_FILE, RECIPE_FILE):
        raw = (made[1] / name).read_bytes()
        for _ in range(60):
            data = bytearray(raw)
            for _ in range(generator.choice([1, 1, 3, 10])):
                data[generator.randrange(len(data))] = generator.randrange(256)
            if generator.random() < 0.3:
                del data[generator.randrange(len(data)) :]
            if data != raw and not outcome(name, bytes(data)):
                assert name == RUN_FILE


def test_a_name_of_a_file_that_no_json_can_hold(tmp_path):
    """Names that are not UTF-8 come through the report."""
    source = tiny_checkpoints.save(tmp_path / "source", {"a.weight": torch.randn(4, 6)})
    (source / "caf\udce9 \x1b[2J").write_text("x")
    pruning.prune(planning.plan(source, FileRecipe(0.5)), tmp_path / "target")
    assert verify(tmp_path / "target", source).is_good
    (tmp_path / "target" / "caf\udce9 \x1b[2J").write_text("xx")
    (problem,) = verify(tmp_path / "target", source).problems
    assert problem == r"'caf\udce9 \x1b[2J' has 2 bytes; expected 1."


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_threshold_that_json_has_no_number_for(tmp_path, scope):
    """The largest magnitude that went is infinite: the report stays JSON for every program."""
    values = torch.tensor([[1.0, float("inf")], [float("-inf"), 2.0]])
    source = tiny_checkpoints.save(tmp_path / "source", {"a.weight": values})
    report = pruning.prune(planning.plan(source, FileRecipe(1.0, scope)), tmp_path / "target")
    assert report.threshold is None and report.tensors[0].threshold is None

    def refuse(constant):
        raise AssertionError(constant)

    raw = (tmp_path / "target" / REPORT_FILE).read_text()
    bits = json.loads(raw, parse_constant=refuse)["threshold_bits"]
    assert bits == ("0x7f800000" if scope == "global" else None)
    assert verify(tmp_path / "target", source).is_good


def test_a_report_is_what_was_written(made):
    report = read_report(made[1])
    assert parse_report(report.result_json(), report.run_json()) == report
    assert parse_report(report.result_json().decode(), report.run_json().decode()) == report
    assert isinstance(report.tensors[0].shape, tuple) and isinstance(report.kept, tuple)


def places(value, path=()):
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


def put(raw, path, text):
    values = json.loads(raw)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "(here)"
    return json.dumps(values).replace('"(here)"', text).encode()
