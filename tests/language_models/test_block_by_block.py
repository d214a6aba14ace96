"""Pruning block after block: each by the inputs that the pruned blocks before it give."""

from itertools import product
from unittest import mock

import pytest
import torch

import distprune as prune
from distprune import language_models
from distprune.language_models import hidden_states
from distprune.language_models.hidden_states import HiddenStates
from distprune.statistics import ActivationStatistics, GramMatrices, prune_sequentially
from distprune.testing import run_ranks
from helpers.models import target
from helpers.sampling import every
from helpers.tiny_language_model import save_tiny_mixtral, tiny_llama, windows_of
from helpers.wrappings import whole


def prune_blocks(folder, wrap, name="llama"):
    """Statistics of each parameter, and its mask, after all blocks are pruned."""
    model = language_models.load_sharded(folder / name, wrap=wrap)
    windows = windows_of(folder, 5)
    parameters = language_models.linear_layers(model)
    statistics = ActivationStatistics(parameters)

    def prune_block(of_block):
        scores = statistics.wanda(of_block)
        method = prune.L1Unstructured
        return prune.global_unstructured(of_block, method, scores, amount=0.5, scope="row")

    reports = language_models.prune_block_by_block(model, windows, statistics, prune_block)
    totals = {pair.fqn: found for pair, found in statistics.totals().items()}
    zeros = {row.name: row.num_pruned for report in reports for row in report.parameters}
    squares = {name: found.squares for name, found in totals.items()}
    return len(reports), {n: f.num_tokens for n, f in totals.items()}, squares, zeros


@pytest.fixture(scope="module")
def folder(llama_and_text):
    save_tiny_mixtral(llama_and_text / "mixtral")
    return llama_and_text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no token came to")
@pytest.mark.parametrize(
    ("name", "wrap"), every(3, list(product(["llama", "mixtral"], ["fsdp2", "ddp"])))
)
def test_ranks_with_unequal_numbers_of_windows_have_the_statistics_of_one_process(
    folder, name, wrap
):
    """2 ranks share 5 windows: in the last step one of them runs a window that does not count.

    Fused experts are pruned by the tokens that came to them.
    """
    num_blocks, tokens, squares, zeros = prune_blocks(folder, "none", name)
    fused = [each for each in tokens if "experts" in each]
    assert num_blocks == 2 and len(fused) == 4 * (name == "mixtral")
    assert all(sum(tokens[each]) == 2 * 5 * 16 for each in fused)
    assert {tokens[each] for each in tokens if each not in fused} == {5 * 16}
    halves = {"gate_up_proj": 4 * 48 * 16 // 2, "down_proj": 4 * 16 * 24 // 2}
    assert all(zeros[each] == halves[each.rpartition(".")[2]] for each in fused)
    for found in run_ranks(prune_blocks, 2, folder, wrap, name):
        assert found[0] == num_blocks and found[1] == tokens and found[3] == zeros
        for each, expected in squares.items():
            torch.testing.assert_close(found[2][each], expected, rtol=1e-6, atol=1e-9)


def test_later_blocks_see_what_pruned_ones_give(folder):
    """The first block's inputs are those of the dense model, the second's are not."""
    model = tiny_llama()
    windows = windows_of(folder, 5)
    dense = ActivationStatistics(language_models.linear_layers(model))
    language_models.calibrate(model, windows, dense)
    _, _, squares, _ = prune_blocks(folder, "none")
    equal = {
        pair.fqn: torch.allclose(found.squares, squares[pair.fqn], rtol=1e-9)
        for pair, found in dense.totals().items()
    }
    assert equal["model.layers.0.self_attn.q_proj.weight"]
    assert not equal["model.layers.1.self_attn.q_proj.weight"]


def update_blocks(folder, wrap, name, is_chain=True):
    """Losses of the layers before and after least squares, and weights, block after block."""
    model = language_models.load_sharded(folder / name, wrap=wrap)
    windows = windows_of(folder, 5)
    grams = GramMatrices(language_models.linear_layers(model), allow_empty="*")

    def prune_block(of_block):
        scores, options = grams.wanda(of_block), {"amount": 0.5, "scope": "row"}
        with prune.keep_pruned_values():
            prune.global_unstructured(of_block, prune.L1Unstructured, scores, **options)
            return prune.reconstruct(of_block, grams)

    with mock.patch.object(HiddenStates, "run", _counted(HiddenStates.run)) as run:
        if is_chain:
            reports = language_models.prune_block_by_block(model, windows, grams, prune_block)
        else:
            batches = [{"input_ids": row[None], "use_cache": False} for row in windows.tokens]
            reports = prune_sequentially(grams, model, model.model.layers, batches, prune_block)
    rows = [row for report in reports for row in report.parameters]
    weights = {row.name: _weight(model, row.name) for row in rows}
    return rows, weights, run.num_calls


def _counted(function):
    def counted(*arguments):
        counted.num_calls += 1
        return function(*arguments)

    counted.num_calls = 0
    return counted


def _weight(model, name):
    """The whole weight, with its zeros."""
    module, key = target(getattr(model, "module", model), name)
    parameters = module._parameters
    return whole(parameters.get(f"{key}_orig", parameters.get(key)))


@pytest.mark.filterwarnings("ignore:no token came to")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_layers_that_run_one_by_one_give_what_the_whole_model_gives(folder, name):
    rows, weights, num_calls = update_blocks(folder, "none", name)
    same_rows, same_weights, none = update_blocks(folder, "none", name, is_chain=False)
    assert num_calls == 2 * 5 and none == 0  # of two blocks, on five windows
    assert rows == same_rows
    assert all(torch.equal(weights[key], same_weights[key]) for key in weights)
    assert all(row.error_after < row.error_before for row in rows if row.error_before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no token came to")
@pytest.mark.parametrize("wrap", every(2, ["fsdp2", "ddp"]))
def test_updated_weights_on_ranks_are_those_of_one_process(folder, wrap):
    _, weights, _ = update_blocks(folder, "none", "llama")
    for _, found, num_calls in run_ranks(update_blocks, 2, folder, wrap, "llama"):
        assert num_calls == 2 * 3
        for key, right in weights.items():
            assert (found[key] - right).abs().max() <= 1e-5 * right.abs().max()


def test_what_does_not_run_block_by_block_is_refused(folder):
    """Layers that need the whole model, and a parameter that is in no block."""
    model, windows = tiny_llama(), windows_of(folder, 2)

    def pruned(pairs):
        statistics = ActivationStatistics(pairs)
        language_models.prune_block_by_block(model, windows, statistics, lambda pairs: None)

    with (
        mock.patch.object(hidden_states, "_runs_alone", lambda block: False),
        pytest.raises(NotImplementedError, match="prune_sequentially runs the whole model"),
    ):
        pruned(language_models.linear_layers(model))
    with pytest.raises(ValueError, match="no block"):
        pruned(prune.select(model, types=torch.nn.Linear, everything=True))


@pytest.mark.slow
def test_the_root_of_fsdp2_is_sharded_again(folder):
    """An optimizer that is made after a measurement has the shards."""
    assert run_ranks(parameters_after_measuring, 2, folder) == [True, True]


def parameters_after_measuring(folder):
    model = language_models.load_sharded(folder / "llama", wrap="fsdp2")
    before = list(model.parameters())
    windows = windows_of(folder, 2)
    language_models.perplexity(model, windows)
    return all(one is other for one, other in zip(before, model.parameters(), strict=True))
