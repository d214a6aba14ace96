"""One layer in memory at a time: what the whole model gives, whatever stops it on the way."""

import filecmp
import itertools
import re
import shutil
from pathlib import Path

import pytest
import torch

import distprune as prune
from distprune import language_models, streaming
from distprune.files import disk as output
from distprune.files.checkpoint import read_header
from distprune.files.errors import CheckpointError, OutputError, SelectionError
from distprune.files.reports import read_report
from distprune.files.verifying import verify
from distprune.statistics import GradientStatistics, GramMatrices
from distprune.testing import run_ranks
from helpers.disk_crashes import disk_is_full
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.streaming import killed_after, other_files, tokens, weights_of
from helpers.tiny_language_model import save_tiny_llama, tiny_tokenizer, write_text
from helpers.tiny_transformers import save_tiny

RECIPE = raw_recipe(sparsity=0.5, score="fisher", normalize=None)
FAMILIES = [
    "llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3",
]  # fmt: skip


def assert_same_sums(one, other):
    totals = other.totals()
    for pair, found in one.totals().items():
        expected = totals[pair]
        assert found.weight == expected.weight
        for a, b in [(found.by_output, expected.by_output), (found.by_input, expected.by_input)]:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.max()))


@pytest.mark.parametrize("family", every(2, FAMILIES))
def test_it_does_what_the_whole_model_does(tmp_path, family):
    """Statistics to 1e-6, masks and perplexities to the bit, moved weights to 1e-5."""
    source = save_tiny(family, tmp_path / "source")
    windows, held_out = tokens(6, seed=1), tokens(4, seed=2)
    out = tmp_path / "out"
    made = streaming.prune_folder(
        source, out, RECIPE, windows, evaluation=held_out, batch_size=4, damping=0.1
    )
    model = language_models.load_sharded(source)
    pairs = prune.select(model)
    assert made.before == language_models.perplexity(model, held_out, batch_size=4).perplexity
    whole = GradientStatistics(pairs)
    language_models.calibrate(model, windows, whole, batch_size=4)
    streamed = GradientStatistics.load(out / "distprune" / "statistics.safetensors", pairs)
    assert_same_sums(whole, streamed)

    grams = GramMatrices(pairs, allow_empty="*")
    language_models.calibrate(model, windows, grams, batch_size=4)
    report = prune.global_unstructured(
        pairs, prune.L1Unstructured, streamed.fisher(), amount=0.5, pipeline_parallel=True
    )
    assert report.num_pruned == made.report.num_pruned
    prune.reconstruct(pairs, grams, damping=0.1)
    written = weights_of(out)
    for module, name in pairs:
        fqn = next(f"{p}.{name}" for p, m in model.named_modules() if m is module)
        weight, mask = getattr(module, name).detach(), getattr(module, f"{name}_mask")
        assert torch.equal(written[fqn] == 0, mask == 0), fqn
        largest = float(weight.abs().max())
        torch.testing.assert_close(written[fqn], weight, rtol=0, atol=1e-5 * largest)
    again = language_models.load_sharded(out)
    assert made.after == language_models.perplexity(again, held_out, batch_size=4).perplexity
    assert verify(out, source).is_good
    assert not list(tmp_path.glob("*.partial*"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a source, and what it becomes; see :func:`made`."""
    folder = tmp_path_factory.mktemp("streaming")
    save_tiny_llama(folder / "source", num_hidden_layers=3)
    write_text(folder / "text.txt", 400)
    run(folder, folder / "out")
    return folder


def run(folder, destination, **options):
    windows, held_out = tokens(6, seed=1, vocabulary=200), tokens(3, seed=2, vocabulary=200)
    return streaming.prune_folder(
        folder / "source", destination, RECIPE, windows, evaluation=held_out, **options
    )


@pytest.mark.parametrize("place", every(7, range(21), start=2))
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(llama, tmp_path, monkeypatch, place):
    """It ends before any of its writes of progress: in each pass, and between them."""
    out = tmp_path / "out"
    if not killed_after(place, monkeypatch, lambda: run(llama, out)):
        assert not out.exists()
        run(llama, out)
    assert set(other_files(out, llama / "out")) <= {"distprune/report.json"}


POLISHED = {"polish": 3, "own_text": streaming.OwnText(tiny_tokenizer(), 2, 12), "batch_size": 4}
POLISHED["update"] = "training"


@pytest.fixture(scope="module")
def polished(tmp_path_factory):
    """The same with a model whose predictions differ by more than rounding."""
    folder = tmp_path_factory.mktemp("polishing")
    save_tiny_llama(folder / "source", num_hidden_layers=3, initializer_range=0.3)
    run(folder, folder / "polished", **POLISHED)
    return folder


@pytest.mark.parametrize("place", every(7, range(20), start=1))
def test_a_killed_polishing_goes_on_from_its_last_step(polished, tmp_path, monkeypatch, place):
    """It ends at a write of progress, of which there is one after each step, too."""
    out = tmp_path / "out"
    monkeypatch.setattr("distprune.streaming.passes._SECONDS_BETWEEN_SAVES", 0)
    if not killed_after(place, monkeypatch, lambda: run(polished, out, **POLISHED)):
        assert not out.exists()
        run(polished, out, **POLISHED)
    assert set(other_files(out, polished / "polished")) <= {"distprune/report.json"}


@pytest.mark.parametrize("step", [1, 3])
def test_a_polishing_is_stopped_at_a_step(polished, tmp_path, monkeypatch, step):
    out = tmp_path / "out"
    monkeypatch.setattr("distprune.streaming.passes._SECONDS_BETWEEN_SAVES", 0)

    def stop(progress):
        if (progress.phase, progress.num_done) == ("polish", step):
            raise Stopped

    with pytest.raises(Stopped):
        run(polished, out, progress=stop, **POLISHED)
    told = []
    run(polished, out, progress=told.append, **POLISHED)
    steps = [each.num_done for each in told if each.phase == "polish"]
    assert steps == [*range(step - 1, 4)]
    assert set(other_files(out, polished / "polished")) <= {"distprune/report.json"}


def test_what_is_trained_of_a_bfloat16_model_is_float32(polished, tmp_path):
    """Steps of 5e-5 would be lost in most weights of bfloat16."""
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / str(dtype)
        run(polished, out, dtype=dtype, polish=12, batch_size=4)
        made.append(torch.tensor(read_report(out).inputs["update"]["polish"]["losses"]))
    assert torch.allclose(*made, rtol=0.05) and not torch.equal(*made)
    assert bool((made[1][-3:] < made[1][:3]).all())  # of the same windows


def states_of(folder):
    """The hidden states of the windows after each layer."""
    model, ids = language_models.load_sharded(folder), tokens(6, seed=1, vocabulary=200).tokens
    return model(input_ids=ids, output_hidden_states=True).hidden_states[1:-1]


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_training_brings_what_layers_return_nearer_to_the_dense_model(polished, tmp_path, dtype):
    """Zeros are those of masks; some ranks have no window of a step."""
    folders = [tmp_path / update for update in ("least_squares", "training")]
    for folder in folders:
        run(polished, folder, update=folder.name, dtype=dtype)
    for plain, trained, dense in zip(*map(states_of, [*folders, polished / "source"]), strict=True):
        assert (trained - dense).norm() < 0.99 * (plain - dense).norm()
    run_ranks(run, 4, polished, tmp_path / "ranks", update="training", dtype=dtype)
    before, after, of_ranks = map(weights_of, [*folders, tmp_path / "ranks"])
    for name, weight in after.items():
        assert torch.equal(weight == 0, before[name] == 0) and torch.equal(weight, of_ranks[name])


def polished_in_memory(plain, source):
    """The model of a folder after the last steps of a pruning, and their losses."""
    text = plain / "distprune" / "own_text.safetensors"
    windows = tokens(6, seed=1, vocabulary=200)
    windows += language_models.read_windows(tiny_tokenizer(), text, 12)
    model, dense = map(language_models.load_sharded, (plain, source))
    prune.masks_from_zeros(model, all_zero="prune")
    return model, language_models.polish(model, dense, windows, prune.select(model), steps=3)


def test_polishing_is_that_of_the_whole_model(polished, tmp_path):
    """Of the folder without it, towards the source; masks are the same, zeros of either stay."""
    run(polished, tmp_path / "plain", **POLISHED | {"polish": 0})
    model, right = polished_in_memory(tmp_path / "plain", polished / "source")
    losses = read_report(polished / "polished").inputs["update"]["polish"]["losses"]
    assert losses == pytest.approx(right, rel=1e-5)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))  # hooks make the last weights
    expected = {
        f"{path}.weight": m.weight for path, m in model.named_modules() if hasattr(m, "weight_mask")
    }
    found, before = weights_of(polished / "polished"), weights_of(tmp_path / "plain")
    assert expected and all(torch.equal(found[n] == 0, w == 0) for n, w in expected.items())
    distance, moved = (
        torch.cat([(weight - other[name]).flatten() for name, weight in expected.items()]).norm()
        for other in (found, before)
    )
    assert distance <= 1e-3 * moved
    for name, weight in weights_of(polished / "source").items():
        assert name in expected or torch.equal(weight, found[name]), name
    assert verify(polished / "polished", polished / "source").is_good


def test_the_last_of_rounds_is_polished_towards_the_source(polished, tmp_path):
    made = run(polished, tmp_path / "out", rounds=[0.2], **POLISHED)
    losses = made.report.inputs["update"]["polish"]["losses"]
    plain = run(polished, tmp_path / "plain", rounds=[0.2], **POLISHED | {"polish": 0})
    _, right = polished_in_memory(tmp_path / "plain", polished / "source")
    assert losses == pytest.approx(right, rel=1e-3) and plain.after != made.after


class Stopped(Exception):
    """Raised by a function that is told of progress."""


def stopping(when):
    """A function for ``progress`` that raises once ``when`` says so."""

    def progress(_):
        if when():
            raise Stopped

    return progress


def test_a_stopped_run_is_resumed_and_a_finished_result_is_found(llama, tmp_path):
    out, calls = tmp_path / "out", itertools.count()
    with pytest.raises(Stopped):
        run(llama, out, progress=stopping(lambda: next(calls) == 4))
    told = []
    made = run(llama, out, tell=told.append)
    assert any("Resuming" in text for text in told)
    again = run(llama, out, tell=told.append)
    assert "finished" in told[-1]
    assert (again.before, again.after, again.errors) == (made.before, made.after, made.errors)


def test_another_command_is_refused_while_a_result_is_unfinished(llama, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        run(llama, out, progress=stopping(lambda: True))
    with pytest.raises(OutputError, match="unfinished result of another"):
        run(llama, out, damping=0.5)
    shutil.rmtree(tmp_path / "out.partial-text")
    run(llama, out, damping=0.5)


@pytest.mark.parametrize(
    ("what", "name", "num_layers"),
    [
        ("flipped", "states/dense-state-00002-*", 2),
        ("missing", "states/before-state-00002-*", 2),
        ("torn", "states/dense-gradient-00001-*", 5),
        ("flipped", "states/after-state-00001-*", 7),
        ("torn", "progress.json", 7),
    ],
)
def test_what_depends_on_a_damaged_file_is_made_again(llama, tmp_path, what, name, num_layers):
    """The file is named, and then the same command ends with the same bytes."""
    out, calls = tmp_path / "out", itertools.count(1)
    with pytest.raises(Stopped):
        run(llama, out, progress=stopping(lambda: next(calls) == num_layers))
    path = max((tmp_path / "out.partial-text").glob(name))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if what == "flipped" else data[: len(data) // 2])
    if what == "missing":
        path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name} is missing or damaged.*same command"):
        run(llama, out)
    assert not out.exists()
    run(llama, out)
    assert set(other_files(out, llama / "out")) <= {"distprune/report.json"}


def test_a_disk_that_is_full_while_hidden_states_are_written(llama, tmp_path, monkeypatch):
    out, calls, write = tmp_path / "out", itertools.count(), Path.write_bytes

    def write_until_full(path, data):
        if next(calls) == 9:
            write(path, data[:100])
            disk_is_full()
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_until_full)
        with pytest.raises(OutputError, match=r"-state-.* cannot be written: No space left"):
            run(llama, out)
    assert not out.exists()
    run(llama, out)
    assert set(other_files(out, llama / "out")) <= {"distprune/report.json"}


@pytest.mark.parametrize(
    ("name", "rounds"), [("out", []), ("out", [0.2]), ("out.partial-text-0", [0.2])]
)
def test_a_command_without_text_is_noticed_before_the_work(llama, tmp_path, name, rounds):
    output.begin(tmp_path / name, "of another command", 0)
    with pytest.raises(OutputError, match=rf"{name}\.partial is the unfinished result of another"):
        run(llama, tmp_path / "out", rounds=rounds, progress=stopping(lambda: True))
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.partial"]


def test_a_disk_without_room_is_an_error_before_the_work(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "free_bytes", lambda folder: 1000)
    with pytest.raises(OutputError, match="1,000 are free"):
        run(llama, tmp_path / "out")


def test_windows_that_the_model_cannot_run_leave_nothing(llama, tmp_path):
    """So that the right command can follow."""
    wrong = {"tokenizer of this": tokens(2, 1, 5000), "not longer": tokens(2, 1, length=5000)}
    for message, windows in wrong.items():
        for text in ((windows, None), (tokens(2, 1), windows)):
            with pytest.raises(ValueError, match=message):
                streaming.prune_folder(
                    llama / "source", tmp_path / "out", RECIPE, text[0], evaluation=text[1]
                )
            assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="not longer"):
        streaming.estimate(llama / "source", RECIPE, 2, 5000)


def test_an_encoder_decoder_is_refused(tmp_path):
    save_tiny("t5", tmp_path / "source")
    with pytest.raises((NotImplementedError, ValueError)):
        streaming.prune_folder(tmp_path / "source", tmp_path / "out", RECIPE, tokens(2, 1))


def test_verify_finds_a_changed_kept_weight(llama, tmp_path):
    out = shutil.copytree(llama / "out", tmp_path / "out")
    assert verify(out, llama / "source").is_good
    from safetensors.torch import load_file, save_file

    tensors = load_file(out / "model.safetensors")
    weight = tensors["model.layers.1.mlp.up_proj.weight"].view(-1)
    weight[int(weight.nonzero()[0])] += 1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert any(
        "checksum of kept weights" in each for each in verify(out, llama / "source").problems
    )


@pytest.mark.parametrize("score", ["wanda", "magnitude"])
def test_other_scores_and_no_update(llama, tmp_path, score):
    """Statistics of activations as the whole model has them; without an update no weight moves."""
    recipe = raw_recipe(score=score, pattern="2:4")
    windows = tokens(6, seed=1, vocabulary=200)
    made = streaming.prune_folder(
        llama / "source", tmp_path / "out", recipe, windows, update="none"
    )
    assert made.before is made.after is None and not made.errors
    before, after = weights_of(llama / "source"), weights_of(tmp_path / "out")
    assert all(bool(((after[n] == before[n]) | (after[n] == 0)).all()) for n in before)
    if score == "wanda":
        model = language_models.load_sharded(llama / "source")
        pairs = prune.select(model)
        statistics = prune.statistics.ActivationStatistics(pairs)
        language_models.calibrate(model, windows, statistics)
        file = tmp_path / "out" / "distprune" / "statistics.safetensors"
        stored = prune.statistics.ActivationStatistics.load(file, pairs)
        totals = stored.totals()
        for pair, found in statistics.totals().items():
            assert torch.equal(found.squares, totals[pair].squares)
    assert verify(tmp_path / "out", llama / "source").is_good


def test_zeros_of_the_source_stay_zero(llama, tmp_path):
    """Under a pattern, too, which keeps zeros of a block that has lost more already."""
    magnitude = raw_recipe(sparsity=0.7, scope="row")
    sparse, windows = tmp_path / "sparse", tokens(6, seed=1, vocabulary=200)
    streaming.prune_folder(llama / "source", sparse, magnitude, windows, update="none")
    before = weights_of(sparse)
    for name, recipe in {
        "pattern": raw_recipe(score="fisher", pattern="2:4"),
        "global": RECIPE,
    }.items():
        streaming.prune_folder(sparse, tmp_path / name, recipe, windows)
        after = weights_of(tmp_path / name)
        for key, weight in before.items():
            assert not bool(after[key][weight == 0].any()), (name, key)
        moved = any(not torch.equal(after[key], before[key]) for key in after)
        assert moved == (name == "pattern")  # else all that is pruned was zero before


@pytest.mark.parametrize("score", ["fisher", "wanda", "ria", "taylor"])
@pytest.mark.filterwarnings("ignore:no token came to", "ignore:all gradients are zero of")
def test_experts_without_a_token_are_ranked_by_magnitude(tmp_path, score):
    """Not by position: they would lose the first half of each row, or all in a global ranking."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 12, "num_experts": 32,
        "num_experts_per_tok": 1,
    }  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).save_pretrained(tmp_path / "source")
    source, windows = tmp_path / "source", tokens(2, seed=1)  # 24 tokens
    recipe = raw_recipe(sparsity=0.5, score=score, scope="row")
    told = []
    options = {"update": "none", "tell": told.append}
    streaming.prune_folder(source, tmp_path / "row", recipe, windows, **options)
    recipe = raw_recipe(sparsity=0.5, score=score, normalize=None)
    streaming.prune_folder(source, tmp_path / "all", recipe, windows, **options)
    before, rows, everywhere = map(weights_of, (source, tmp_path / "row", tmp_path / "all"))
    num_equal = 0
    for name, weight in before.items():
        if "experts" in name:
            order = weight.abs().argsort(-1).argsort(-1)
            by_magnitude = order >= weight.shape[-1] // 2
            num_equal += int((by_magnitude == (rows[name] != 0)).all(-1).all(-1).sum())
            is_zero = (everywhere[name] == 0).double().mean((1, 2))
            # All inputs of down_proj are small, of whatever expert.
            assert "down" in name or bool((is_zero < 1).all()), (name, is_zero)
    # Of 32 experts 8 or more saw nothing; of RIA, the order is that of relative magnitudes.
    assert num_equal >= 16 * (score != "ria")
    if score != "taylor":
        assert len([text for text in told if "matrices): these are ranked" in text]) == 2, told


def test_moved_weights_that_overflow_are_refused(llama, tmp_path):
    """In float16, as the checkpoint stores them, whatever the model computes in."""
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(llama / "source", tmp_path / "source")
    tensors = {name: t.half() for name, t in load_file(source / "model.safetensors").items()}
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 65000)
    for each in ("up_proj", "gate_proj"):  # all inputs of it are equal
        tensors[f"model.layers.1.mlp.{each}.weight"][:] = 0.001
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: moved weights are not finite"):
        streaming.prune_folder(
            source, tmp_path / "out", RECIPE.model_copy(update={"scope": "row"}),
            tokens(6, seed=1, vocabulary=200), dtype=torch.float32,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def on_ranks(folder, destination):
    made = run(folder, destination)
    return made.before, made.after, made.report.num_pruned


@pytest.mark.parametrize("num_ranks", every(2, [2, 3]))
def test_ranks_share_the_windows(llama, tmp_path, num_ranks):
    """Scores and errors of one process, to 1e-6; the exact count."""
    out = tmp_path / "out"
    found = run_ranks(on_ranks, num_ranks, llama, out)
    assert len(set(found)) == 1
    one = run(llama, llama / "out")
    before, after, num_pruned = found[0]
    assert num_pruned == one.report.num_pruned
    # This process may use more threads, whose products are rounded otherwise.
    assert (before, after) == pytest.approx((one.before, one.after), rel=1e-5)
    pairs = prune.select(language_models.load_sharded(llama / "source"))
    files = [folder / "distprune" / "statistics.safetensors" for folder in (out, llama / "out")]
    of_ranks, of_one = (GradientStatistics.load(file, pairs) for file in files)
    assert_same_sums(of_ranks, of_one)
    assert verify(out, llama / "source").is_good


def test_rounds_go_on_from_the_round_before(llama, tmp_path):
    """As three commands would; a stop in any of them keeps the rounds that are done."""
    out, told = tmp_path / "out", []

    second = tmp_path / "out.partial-text-1.partial-text" / "progress.json"
    rounds = {"rounds": [0.2, 0.3], "tell": told.append}
    with pytest.raises(Stopped):
        run(llama, out, **rounds, progress=stopping(second.exists))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "out.partial-text-0", "out.partial-text-1.partial-text"
    ]  # fmt: skip
    made = run(llama, out, **rounds)
    assert [text for text in told if text.startswith("Round")] == [
        "Round 1 of 3: 20%.", "Round 2 of 3: 30%.", "Round 2 of 3: 30%.", "Round 3 of 3: 50%."
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert run(llama, out, **rounds).after == made.after

    windows, source, statistics = tokens(6, seed=1, vocabulary=200), llama / "source", None
    for number, sparsity in enumerate([0.2, 0.3, 0.5]):
        step = tmp_path / f"step{number}"
        recipe = RECIPE.model_copy(update={"sparsity": sparsity, "statistics": statistics})
        streaming.prune_folder(source, step, recipe, windows)
        statistics = str(step / "distprune" / "statistics.safetensors")  # of the dense model
        source = step
    assert filecmp.cmp(out / "model.safetensors", source / "model.safetensors", shallow=False)
    assert made.before == run(llama, llama / "out").before
    with pytest.raises(SelectionError, match="rising ones below the sparsity"):
        run(llama, tmp_path / "other", rounds=[0.6])


@pytest.fixture(scope="module", params=["least_squares", "none"])
def in_rounds(request, llama, tmp_path_factory):
    """A result of two rounds; the source has a file that is not copied."""
    folder = tmp_path_factory.mktemp("rounds")
    shutil.copytree(llama / "source", folder / "source")
    (folder / "source" / "pytorch_model.bin").write_bytes(b"stale")
    run(folder, folder / "out", rounds=[0.3], update=request.param)
    return folder


def verified(folder):
    return verify(folder / "out", folder / "source")


def test_verify_says_what_it_knows_of_rounds(in_rounds):
    """All but the order: zeros, counts, other bytes, checksums, the report."""
    found = verified(in_rounds)
    assert found.problems == () and not found.has_order
    report = read_report(in_rounds / "out")
    assert not any("sparse already" in each for each in report.warnings)  # the round before was it
    assert found.num_pruned == report.num_pruned == round(0.5 * found.num_elements)
    found = run_ranks(verified, 2, in_rounds)
    assert [(each.problems, each.has_order) for each in found] == [((), False)] * 2


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("pruned", "neither kept as they were nor pruned"),
        ("kept", "kept weights are not|neither kept as they were"),
        ("dense", "belong to no pruned tensor"),
        ("mask", "elements are pruned in all|neither kept as they were"),
    ],
)
def test_verify_finds_what_is_wrong_after_rounds(in_rounds, tmp_path, what, expected):
    source, out = in_rounds / "source", shutil.copytree(in_rounds / "out", tmp_path / "out")
    name = "model.norm.weight" if what == "dense" else "model.layers.1.mlp.up_proj.weight"
    path = out / ("distprune/masks.safetensors" if what == "mask" else "model.safetensors")
    start = {entry.name: entry.start for entry in read_header(path, "").tensors}[name]
    if what in ("pruned", "kept"):
        weight = weights_of(out)[name].view(-1)
        place = (weight == 0) if what == "pruned" else (weight != 0)
        start += 4 * int(place.nonzero()[0])
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    problems = verify(out, source).problems
    assert any(re.search(expected, problem) for problem in problems), problems


def on_ranks_with_a_damaged_disk(folder, destination, kind):
    """Rank 1 alone cannot write its first files of a kind."""
    import torch.distributed as dist

    from distprune.streaming.windows import WindowStream

    write = WindowStream._write

    def broken(self, of_kind, *arguments):
        if dist.get_rank() == 1 and of_kind == kind:
            raise OutputError("the disk of rank 1 is full")
        write(self, of_kind, *arguments)

    WindowStream._write = broken
    try:
        run(folder, destination)
    except Exception as error:
        return type(error).__name__, str(error), destination.exists()
    finally:
        WindowStream._write = write
    return None


@pytest.mark.parametrize("kind", ["state", "gradient"])
def test_an_error_of_one_rank_is_raised_on_all(llama, tmp_path, kind):
    found = run_ranks(on_ranks_with_a_damaged_disk, 2, llama, tmp_path / "out", kind)
    assert all("disk of rank 1 is full" in text and not exists for _, text, exists in found), found
    assert {kind for kind, _, _ in found} <= {"OutputError", "RuntimeError"}
