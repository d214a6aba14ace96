"""Scores of single weights, from a backward that is streamed: files that the one engine ranks."""

import filecmp
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import distprune as prune
from distprune import criteria, language_models, streaming
from distprune.files.errors import OutputError, SelectionError
from distprune.files.verifying import verify
from distprune.testing import run_ranks
from helpers.recipes import raw_recipe
from helpers.streaming import killed_after, other_files, tokens, weights_of
from helpers.tiny_language_model import save_tiny_llama
from helpers.tiny_transformers import save_tiny

TAYLOR = raw_recipe(sparsity=0.5, score="taylor", normalize=None)
BOTH = raw_recipe(
    groups=(
        TAYLOR.model_copy(update={"include": ("*self_attn*",)}),
        TAYLOR.model_copy(update={"score": "elementwise_fisher", "exclude": ("*self_attn*",)}),
    )
)


def read_scores(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def laid_out(scores, source, place):
    """Scores of tensors of a checkpoint, by the names and shapes of the model's parameters."""
    shutil.copytree(source, place)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, **scores}, place / "model.safetensors", metadata={"format": "pt"})
    return weights_of(place)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_scores_are_those_of_the_whole_model_and_masks_follow_from_them(tmp_path, family):
    """Scores to 1e-6; given the same scores, the masks to the bit."""
    source, out, kept = save_tiny(family, tmp_path / "source"), tmp_path / "out", tmp_path / "kept"
    windows = tokens(6, seed=1)
    streaming.prune_folder(source, out, BOTH, windows, batch_size=4, damping=0.1, keep_scores=kept)
    model = language_models.load_sharded(source)
    pairs = prune.select(model)
    names = {id(p): name for name, p in model.named_parameters()}
    fqns = {pair: names[id(getattr(*pair))] for pair in pairs}
    attention = [pair for pair in pairs if "self_attn" in fqns[pair]]
    others = [pair for pair in pairs if pair not in attention]
    written = laid_out(read_scores(kept), source, tmp_path / "scores")
    for criterion in [
        criteria.Taylor(attention, unit="rank_batch", power=1),
        criteria.Fisher(others, unit="rank_batch"),
    ]:
        language_models.calibrate(model, windows, criterion, batch_size=4)
        for pair, score in criterion.scores().items():
            found = written[fqns[pair]]
            assert float(score.max()) > 0
            torch.testing.assert_close(found, score, rtol=1e-6, atol=1e-6 * float(score.max()))
    for some in (attention, others):
        scores = {pair: written[fqns[pair]] for pair in some}
        prune.global_unstructured(
            some, prune.L1Unstructured, scores, amount=0.5, pipeline_parallel=True
        )
    pruned = weights_of(out)
    for module, name in pairs:
        mask = getattr(module, f"{name}_mask")
        assert torch.equal(pruned[fqns[module, name]] == 0, mask == 0)
    assert verify(out, source, scores=kept).is_good


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a source, and the result and the scores of an undisturbed run."""
    folder = tmp_path_factory.mktemp("elementwise")
    save_tiny_llama(folder / "source", num_hidden_layers=3)
    run(folder, folder)
    return folder


def run(folder, place, **options):
    return streaming.prune_folder(
        folder / "source",
        place / "out",
        TAYLOR,
        tokens(6, seed=1, vocabulary=200),
        **{"update": "none", "keep_scores": place / "kept", **options},
    )


def test_a_run_that_is_killed_in_the_backward_ends_with_the_same_bytes(
    llama, tmp_path, monkeypatch
):
    """Twice: before the second layer is recorded, and before the folder of scores is."""
    progress = tmp_path / "out.partial-text" / "progress.json"
    for num_writes, found in [(6, [2]), (3, [2, 1, 0])]:
        assert not killed_after(num_writes, monkeypatch, lambda: run(llama, tmp_path))
        done = json.loads(progress.read_text())
        assert done["backward"] == found and "scores" not in done
    run(llama, tmp_path)
    assert set(other_files(tmp_path / "out", llama / "out")) <= {"distprune/report.json"}
    assert not other_files(tmp_path / "kept", llama / "kept")


def on_ranks(folder, place):
    run(folder, place)


def test_ranks_add_up_what_their_windows_gave(llama, tmp_path):
    run_ranks(on_ranks, 2, llama, tmp_path)
    expected, found = read_scores(llama / "kept"), read_scores(tmp_path / "kept")
    assert expected.keys() == found.keys()
    for name, score in expected.items():
        torch.testing.assert_close(found[name], score, rtol=1e-6, atol=1e-6 * float(score.max()))


def test_kept_scores_rank_again(llama, tmp_path):
    """Without a backward; and where they are not kept, they are gone."""
    recipe = TAYLOR.model_copy(update={"scores": str(llama / "kept")})
    windows = tokens(6, seed=1, vocabulary=200)
    source, out = llama / "source", tmp_path / "out"
    streaming.prune_folder(source, out, recipe, windows, update="none")
    for name in ("model.safetensors", "distprune/masks.safetensors"):
        assert filecmp.cmp(out / name, llama / "out" / name, shallow=False)
    streaming.prune_folder(source, tmp_path / "gone", TAYLOR, windows, update="none")
    assert not (tmp_path / "gone.partial-text").exists()
    with pytest.raises(SelectionError, match="single weights get none"):
        streaming.prune_folder(source, tmp_path / "a", recipe, windows, keep_scores=tmp_path / "b")
    with pytest.raises(OutputError, match="free name for the scores"):
        run(llama, tmp_path / "out", keep_scores=llama / "kept")
    given = TAYLOR.model_copy(update={"score": "given"})
    with pytest.raises(SelectionError, match="score given needs scores"):
        streaming.prune_folder(source, tmp_path / "a", given, windows)


def test_rounds_have_scores_of_their_own(llama, tmp_path):
    """Those of the last round stay; verify compares all but the order, which they do not decide."""
    run(llama, tmp_path, rounds=[0.3], update="least_squares")
    expected, found = read_scores(llama / "kept"), read_scores(tmp_path / "kept")
    assert expected.keys() == found.keys()
    assert not any(torch.equal(expected[name], found[name]) for name in found)
    result = verify(tmp_path / "out", llama / "source", scores=tmp_path / "kept")
    assert result.problems == () and not result.has_order
