"""Whatever happens during a pruning: no result or the whole one, and the next run ends the same."""

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from distprune._common.process_groups import world
from distprune.files import planning, pruning
from distprune.files.errors import CheckpointError, FilesError, Interrupted, OutputError
from distprune.files.partial import discard
from distprune.files.recipe import FileRecipe
from distprune.testing import RankError, run_ranks
from helpers import tiny_checkpoints
from helpers.disk_crashes import Steps, disk_is_full, kill_self, run_forked, stop_after
from helpers.sampling import THOROUGH, every
from helpers.small_work_units import small_units
from helpers.tiny_checkpoints import encode, tree_digest

RUN = ("distprune/run.json",)
WAYS = {
    "global": FileRecipe(0.5),
    "layer": FileRecipe(0.5, "layer"),
    "pattern": FileRecipe(pattern="2:4"),
}


@pytest.fixture(autouse=True)
def many_small_units():
    with small_units():
        yield


@pytest.fixture
def source(tmp_path):
    return tiny_checkpoints.save_two_files(tmp_path / "source")


def prune(source, target, way="global", **kwargs):
    return pruning.prune(planning.plan(source, WAYS[way]), target, **kwargs)


def undisturbed(source, tmp_path, way="global"):
    """The digest of what has to come out, and how many steps it took."""
    with Steps() as steps:
        prune(source, tmp_path / "undisturbed", way)
    return tree_digest(tmp_path / "undisturbed", RUN), steps.count


def killed_at(step, source, target, way):
    with Steps(step, kill_self):
        prune(source, target, way)


@pytest.mark.parametrize("way", every(3, WAYS))
def test_killed_at_any_step_it_goes_on_and_ends_the_same(source, tmp_path, way):
    wanted, num_steps = undisturbed(source, tmp_path, way)
    target = tmp_path / "target"
    # The first and last steps are special; between them, any.
    middle = random.Random(way).sample(range(6, num_steps - 12), 12 if THOROUGH else 4)
    last = every(2, range(num_steps - 12, num_steps + 1))
    for step in (1, 3, *middle, *last):
        status = run_forked(killed_at, step, source, target, way)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, step
        prune(source, target, way)  # also where only the lock had to be removed
        assert tree_digest(target, RUN) == wanted, step
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"source", "undisturbed", "target"}, step
        run_forked(remove, target)


def remove(path):
    import shutil

    shutil.rmtree(path)


def test_killed_again_and_again(source, tmp_path):
    wanted, num_steps = undisturbed(source, tmp_path)
    target = tmp_path / "target"
    generator, num_kills = random.Random(1), 0
    while not target.exists() and num_kills < 30:
        step = generator.randrange(5, num_steps // 2)
        num_kills += run_forked(killed_at, step, source, target, "global") != 0
    assert num_kills > 3
    assert tree_digest(target, RUN) == wanted


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("writing", ("pwrite",)),
        ("syncing", ("fsync",)),
        ("reporting", ("write",)),
    ],
)
def test_a_full_disk_is_told_and_survived(source, tmp_path, where, names):
    wanted, _ = undisturbed(source, tmp_path)
    with Steps(names=names) as steps:
        prune(source, tmp_path / "counted")
    for step in (1, steps.count // 2, steps.count):
        target = tmp_path / f"target{step}"
        with Steps(step, disk_is_full, names) as steps, pytest.raises(OutputError) as error:
            prune(source, target)
        assert steps.has_acted and "No space left" in str(error.value)
        # The last sync is that of the folder, after the rename.
        if not target.exists():
            prune(source, target)
        assert tree_digest(target, RUN) == wanted


def test_short_writes_are_continued(source, tmp_path, monkeypatch):
    wanted, _ = undisturbed(source, tmp_path)
    pwrite, short = os.pwrite, []

    def half(descriptor, data, offset):
        short.append(len(data))
        return pwrite(descriptor, data[: max(len(data) // 2, 1)], offset)

    monkeypatch.setattr(os, "pwrite", half)
    prune(source, tmp_path / "target")
    assert max(short) > 1
    assert tree_digest(tmp_path / "target", RUN) == wanted


def test_too_little_room_is_found_before_anything_is_written(tmp_path):
    size = 2**43
    header = {
        "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "U8", "shape": [size], "data_offsets": [16, 16 + size]},
    }
    source = tmp_path / "source"
    source.mkdir()
    raw = encode(header)
    (source / "model.safetensors").write_bytes(raw)
    try:
        os.truncate(source / "model.safetensors", len(raw) + 16 + size)  # sparse
    except OSError:
        pytest.skip("the file system has no files of 8 TB")
    for kind, text in on_one_rank_and_on_two(source, tmp_path / "target"):
        assert kind == "OutputError" and "more bytes" in text
    assert not list(tmp_path.glob("target*"))


@small_units()
def outcome(source, target, way="global"):
    """What a run says, by kind and text."""
    try:
        return "Report", prune(source, target, way).num_pruned
    except FilesError as error:
        return type(error).__name__, str(error)


def on_one_rank_and_on_two(*arguments):
    return [outcome(*arguments), *run_ranks(outcome, 2, *arguments)]


def stopped(source, target, after):
    """The error of a run that stops after so many steps."""
    with pytest.raises(Interrupted) as error:
        prune(source, target, stop=stop_after(after))
    return str(error.value)


def test_stopped_as_asked_it_goes_on_with_any_number_of_ranks(source, tmp_path):
    wanted, _ = undisturbed(source, tmp_path)
    target = tmp_path / "target"
    stopped(source, target, 30)
    (unfinished,) = tmp_path.glob("target.partial-*")
    done = sum(len(p.read_text().splitlines()) for p in unfinished.glob("distprune/work/done-*"))
    assert done > 0
    kinds = run_ranks(stopped_on_the_last_rank, 3, source, target)
    assert kinds == ["Interrupted"] * 3
    run_ranks(outcome, 2, source, target)
    assert tree_digest(target, RUN) == wanted


@small_units()
def stopped_on_the_last_rank(source, target):
    calls = []

    def stop():
        calls.append(1)
        return dist.get_rank() == 2 and len(calls) > 3

    try:
        prune(source, target, stop=stop)
    except FilesError as error:
        return type(error).__name__


def test_another_recipe_or_source_does_not_take_up_what_is_unfinished(source, tmp_path):
    stopped(source, tmp_path / "target", 30)
    for kind, text in on_one_rank_and_on_two(source, tmp_path / "target", "layer"):
        assert kind == "OutputError" and "unfinished result" in text
    os.utime(source / "config.json", ns=(1, 1))
    with pytest.raises(OutputError, match="unfinished result"):
        prune(source, tmp_path / "target")


def test_destinations_that_are_refused(source, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (tmp_path / "link").symlink_to(source, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = tree_digest(source)
    for target, text in {
        taken: "exists",
        source: "inside the source",
        tmp_path / "dangling": "exists",
        source / "inside": "inside the source",
        tmp_path / "link" / "inside": "inside the source",
        tmp_path / "none" / "target": "is not a folder",
    }.items():
        for kind, words in on_one_rank_and_on_two(source, target):
            assert kind == "OutputError" and text in words
    assert tree_digest(source) == before
    assert {p.name for p in tmp_path.iterdir()} == {"source", "taken", "link", "dangling"}


def test_two_runs_on_one_destination(source, tmp_path):
    target, lock = tmp_path / "target", tmp_path / "target.partial.lock"

    def second():
        with pytest.raises(OutputError, match="another run is at work"):
            prune(source, target)

    statuses = []

    def try_in_between():
        statuses.append(run_forked(second))

    with Steps(20, try_in_between):
        prune(source, target)
    assert statuses == [0]
    assert not lock.exists()


def test_a_destination_that_appears_during_the_run_is_not_replaced(source, tmp_path):
    target = tmp_path / "target"
    with Steps(20, target.mkdir) as steps, pytest.raises(OutputError, match="exists"):
        prune(source, target)
    assert steps.has_acted and not list(target.iterdir())
    target.rmdir()
    prune(source, target)


def test_weights_are_on_the_disk_before_a_journal_says_so(source, tmp_path, monkeypatch):
    """A loss of power cannot be made here; the order of syncs can be seen."""
    fsync, synced = os.fsync, []

    def noting(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    prune(source, tmp_path / "target")
    files = {path.name for path in source.iterdir()}
    journals = [i for i, name in enumerate(synced) if name.startswith("done-")]
    assert len(journals) > 3
    for before, journal in zip([0, *journals], journals, strict=False):
        assert files & set(synced[before:journal])
    assert files <= set(synced[: journals[-1]])
    report = synced.index("report.json.new")
    assert report > journals[-1] and synced[report + 1 :] == [
        "distprune",
        "distprune",
        tmp_path.name,
    ]


def test_a_source_that_changes_is_an_error(source, tmp_path):
    path = source / "model-00002-of-00002.safetensors"
    for change in (truncate, rewrite):
        plan = planning.plan(source, WAYS["global"])
        whole = path.read_bytes()
        change(path)
        with pytest.raises(CheckpointError, match=r"truncated|has changed"):
            pruning.prune(plan, tmp_path / "target")
        assert not (tmp_path / "target").exists()
        path.write_bytes(whole)
        discard(tmp_path / "target")


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def rewrite(path):
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(5, 5))


def test_the_source_is_never_opened_for_writing(source, tmp_path, monkeypatch):
    really_open, flags_of = os.open, {}

    def noting(path, flags, *args, **kwargs):
        flags_of.setdefault(str(path), []).append(flags)
        return really_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", noting)
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    prune(source, tmp_path / "target")
    opened = [flags for path, all_of in flags_of.items() if str(source) in path for flags in all_of]
    assert opened and all(flags & os.O_ACCMODE == os.O_RDONLY for flags in opened)


def test_ranks_that_were_called_differently(source, tmp_path):
    texts = run_ranks(called_differently, 2, source, tmp_path / "target")
    assert all("recipe.sparsity" in text and "0.25" in text for text in texts)
    assert not list(tmp_path.glob("target*"))


def called_differently(source, target):
    plan = planning.plan(source, FileRecipe(0.5 if dist.get_rank() == 0 else 0.25))
    with pytest.raises(FilesError) as error:
        pruning.prune(plan, target)
    assert error.value.exit_code == 5
    return str(error.value)


def test_an_error_on_one_rank_is_that_of_all(source, tmp_path):
    found = run_ranks(cannot_read_on_rank_one, 3, source, tmp_path / "target")
    assert all(kind == "CheckpointError" for kind, _ in found)
    assert all("on rank 1" in text and "model-0000" in text for _, text in found)


def cannot_read_on_rank_one(source, target):
    def no_file():
        raise OSError(5, "Input/output error")

    with Steps(2 if dist.get_rank() == 1 else 0, no_file, ("preadv",)):
        return outcome(source, target)


@pytest.mark.parametrize("name", every(3, ["preadv", "pwrite", "fsync"], 1))
def test_a_lost_rank_is_noticed_and_the_rest_done_later(source, tmp_path, name):
    wanted, _ = undisturbed(source, tmp_path)
    target, told = tmp_path / "target", tmp_path / "told"
    with pytest.raises(RankError, match="rank 1"):
        run_ranks(losing_rank_one, 3, source, target, told, name)
    assert {(tmp_path / f"told{rank}").read_text() for rank in (0, 2)} == {"RanksError"}
    assert not target.exists() and not (tmp_path / "told1").exists()
    assert run_ranks(outcome, 2, source, target)[0][0] == "Report"
    assert tree_digest(target, RUN) == wanted


def losing_rank_one(source, target, told, name):
    rank = dist.get_rank()
    with Steps(2 if rank == 1 else 0, lambda: os._exit(3), (name,)):
        kind, _ = outcome(source, target)
    told.with_name(f"told{rank}").write_text(kind)


def test_a_rank_that_hangs_ends_the_others(source, tmp_path):
    kinds = run_ranks(hanging_on_rank_one, 2, source, tmp_path / "target", tmp_path / "told")
    assert kinds[0] == "RanksError"
    assert not (tmp_path / "target").exists()


@small_units()
def hanging_on_rank_one(source, target, told):
    group = dist.new_group(timeout=timedelta(seconds=1))

    def hang():
        while dist.get_rank() == 1 and not told.exists():
            time.sleep(0.05)
        return False

    try:
        prune(source, target, communicator=world(group), stop=hang)
    except FilesError as error:
        return type(error).__name__
    finally:
        told.touch()
