"""A folder is shrunk layer by layer to the bytes of the model in memory, whatever stops it."""

import filecmp
import itertools

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from distprune import language_models, streaming
from distprune.files import disk
from distprune.files.errors import OutputError, SelectionError
from distprune.testing import run_ranks
from helpers.causal_language_models import small_model
from helpers.disk_crashes import disk_is_full
from helpers.sampling import every
from helpers.streaming import Killed, killed_after, other_files, tokens

SHARES = {
    "LlamaForCausalLM": {"neurons": 0.25},
    "Gemma3ForCausalLM": {"neurons": 0.25},  # ties its head
    "MixtralForCausalLM": {"experts": 0.25},  # is stored as a tensor for each expert
}
# Three windows do not divide among two ranks.
WINDOWS = tokens(3, seed=1)


def saved(folder, name, **changes):
    small_model(name, **changes).save_pretrained(folder / name)
    return folder / name


def in_memory(source, out, windows=WINDOWS, **options):
    model = language_models.load_sharded(source, device="cpu")
    small, report = language_models.shrink(model, windows, round_to=2, **options)
    language_models.save_sharded(small, out, source=source)
    return report


def streamed(source, out, windows=WINDOWS, **options):
    return streaming.shrink_folder(source, out, windows, round_to=2, **options)


def assert_same(found, expected):
    """All files that the model in memory is saved as; the other has its report beside them."""
    for path in expected.iterdir():
        assert filecmp.cmp(path, found / path.name, shallow=False), path.name
    assert [p.name for p in found.parent.glob(f"{found.name}.partial*")] == []


@pytest.mark.parametrize(
    ("name", "windows"), [*((name, WINDOWS) for name in SHARES), ("LlamaForCausalLM", None)]
)
def test_it_is_what_is_made_in_memory(tmp_path, name, windows):
    """Without text the smallest neurons go."""
    source, out = saved(tmp_path, name), tmp_path / "out"
    (source / "README.md").write_text("a card")
    report = streamed(source, out, windows, **SHARES[name])
    assert report == in_memory(source, tmp_path / "right", windows, **SHARES[name])
    assert_same(out, tmp_path / "right")
    told = []
    (tmp_path / "out.partial-text").mkdir()  # of a run that was killed at its very end
    assert streamed(source, out, windows, tell=told.append, **SHARES[name]) == report
    assert "is finished" in told[0] and not list(tmp_path.glob("out.*"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with sources and what they become, by name."""
    folder = tmp_path_factory.mktemp("shrinking")
    for name in ("LlamaForCausalLM", "MixtralForCausalLM"):
        source = saved(folder, name)
        streamed(source, folder / f"{name}.right", **SHARES[name])
    return folder


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("LlamaForCausalLM", place) for place in every(5, range(15), start=1)),
        *(("MixtralForCausalLM", place) for place in every(2, range(7), start=1)),
    ],
)
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    made, tmp_path, monkeypatch, name, place
):
    """It ends before any of its writes of progress: in each pass, and between them."""
    source, out = made / name, tmp_path / "out"
    if not killed_after(place, monkeypatch, lambda: streamed(source, out, **SHARES[name])):
        assert not out.exists()
        streamed(source, out, **SHARES[name])
    assert other_files(out, made / f"{name}.right") == []


@pytest.mark.parametrize("what", ["killed", "full"])
def test_a_run_that_ends_while_the_result_is_written(made, tmp_path, monkeypatch, what):
    """Nothing is run again, and nothing is left of the attempt."""
    source, out = made / "LlamaForCausalLM", tmp_path / "out"
    write = disk.write_atomically

    def stop(path, data):
        if str(path).endswith("shrunk.json"):
            if what == "killed":
                raise Killed
            with disk.writing(path):
                disk_is_full()
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_atomically", stop)
        with pytest.raises(Killed if what == "killed" else OutputError):
            streamed(source, out, neurons=0.25)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial-text"]
    told = []
    streamed(source, out, neurons=0.25, progress=told.append)
    assert told == [] and other_files(out, made / "LlamaForCausalLM.right") == []


def test_a_disk_that_is_full_while_layers_are_written(made, tmp_path, monkeypatch):
    source, out, calls = made / "MixtralForCausalLM", tmp_path / "out", itertools.count()
    write_all = disk.write_all

    def write_until_full(descriptor, data):
        if next(calls) == 4:
            disk_is_full()
        write_all(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_all", write_until_full)
        with pytest.raises(OutputError, match=r"cannot be written: No space left"):
            streamed(source, out, experts=0.25)
    assert not out.exists()
    streamed(source, out, experts=0.25)
    assert other_files(out, made / "MixtralForCausalLM.right") == []
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    with pytest.raises(OutputError, match="1,000 are free"):
        streamed(source, tmp_path / "other", experts=0.25)


def on_ranks(folder, out, name, share):
    """Beside a model that is sharded."""
    other, source = fully_shard(nn.Linear(2, 2)), folder / name
    right = in_memory(source, out / f"{name}.right", **share)
    return right == streamed(source, out / name, **share) and other is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_ranks_share_the_windows(made, tmp_path, name):
    """They give what they give in memory, and what one process gives: the same bytes."""
    assert run_ranks(on_ranks, 2, made, tmp_path, name, SHARES[name]) == [True, True]
    assert_same(tmp_path / name, tmp_path / f"{name}.right")
    assert other_files(tmp_path / name, made / f"{name}.right") == []


def test_what_is_refused(made, tmp_path, monkeypatch):
    """Before weights are read, and without a trace."""
    from distprune.streaming.layers import StreamedModel

    saved(tmp_path, "GraniteMoeForCausalLM")
    saved(tmp_path, "DeepseekV3ForCausalLM", first_k_dense_replace=1)
    before = sorted(tmp_path.iterdir())
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(StreamedModel, "values_of", None)
        for kind, message, source, options in [
            (SelectionError, "expected one of them. Take experts out first",
             tmp_path / "DeepseekV3ForCausalLM", {"neurons": 0.5, "experts": 0.25}),
            (NotImplementedError, "are no chain", tmp_path / "GraniteMoeForCausalLM",
             {"experts": 0.25}),
            (NotImplementedError, "experts.down_proj is not what", made / "MixtralForCausalLM",
             {"neurons": 0.25}),
            (ValueError, "expected shares below 1", made / "LlamaForCausalLM", {}),
            (OutputError, "exists, and is no finished", made / "LlamaForCausalLM",
             {"neurons": 0.25, "out": made}),
        ]:  # fmt: skip
            options = {"out": out} | options
            with pytest.raises(kind, match=message):
                streamed(source, options.pop("out"), **options)
            if kind is not OutputError:
                with pytest.raises(kind, match=message):
                    streaming.sizes_of_shrunk(source, round_to=1, **options)
    assert sorted(tmp_path.iterdir()) == before
    assert not killed_after(2, monkeypatch, lambda: streamed(made / "LlamaForCausalLM", out,
                                                             neurons=0.25))  # fmt: skip
    with pytest.raises(OutputError, match="unfinished result of another"):
        streamed(made / "LlamaForCausalLM", out, neurons=0.5)
