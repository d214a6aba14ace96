"""Pruning block after block: each by the inputs that the pruned blocks before it give."""

import pytest
import torch

import distprune as prune
from distprune import language_models
from distprune.statistics import ActivationStatistics
from distprune.testing import run_ranks
from helpers.sampling import every
from helpers.tiny_language_model import save_tiny_llama, save_tiny_mixtral, tiny_llama, write_text


def prune_blocks(folder, wrap, name="llama"):
    """Statistics of each parameter, and its mask, after all blocks are pruned."""
    model = language_models.load_sharded(folder / name, wrap=wrap)
    tokenizer = language_models.load_tokenizer(folder / name)
    windows = language_models.read_windows(tokenizer, folder / "text.txt", 16, limit=5)
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
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("block_by_block")
    save_tiny_llama(folder / "llama")
    save_tiny_mixtral(folder / "mixtral")
    write_text(folder / "text.txt", 400)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("wrap", every(2, ["fsdp2", "ddp"]))
def test_ranks_with_unequal_numbers_of_windows_have_the_statistics_of_one_process(folder, wrap):
    """2 ranks share 5 windows: in the last step one of them runs a window that does not count."""
    num_blocks, tokens, squares, zeros = prune_blocks(folder, "none")
    assert num_blocks == 2 and set(tokens.values()) == {5 * 16}
    for found in run_ranks(prune_blocks, 2, folder, wrap):
        assert found[0] == num_blocks and found[1] == tokens and found[3] == zeros
        for name, expected in squares.items():
            torch.testing.assert_close(found[2][name], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no token came to")
@pytest.mark.parametrize("wrap", every(2, ["fsdp2", "ddp"], start=1))
def test_fused_experts_are_pruned_by_the_tokens_that_came_to_them(folder, wrap):
    _, tokens, squares, zeros = prune_blocks(folder, "none", "mixtral")
    fused = [name for name in tokens if "experts" in name]
    assert len(fused) == 4 and all(sum(tokens[name]) == 2 * 5 * 16 for name in fused)
    halves = {"gate_up_proj": 4 * 48 * 16 // 2, "down_proj": 4 * 16 * 24 // 2}
    assert all(zeros[name] == halves[name.rpartition(".")[2]] for name in fused)
    for found in run_ranks(prune_blocks, 2, folder, wrap, "mixtral"):
        assert found[1] == tokens and found[3] == zeros
        for name, expected in squares.items():
            torch.testing.assert_close(found[2][name], expected, rtol=1e-6, atol=1e-9)


def test_later_blocks_see_what_pruned_ones_give(folder):
    """The first block's inputs are those of the dense model, the second's are not."""
    model = tiny_llama()
    tokenizer = language_models.load_tokenizer(folder / "llama")
    windows = language_models.read_windows(tokenizer, folder / "text.txt", 16, limit=5)
    dense = ActivationStatistics(language_models.linear_layers(model))
    language_models.calibrate(model, windows, dense)
    _, _, squares, _ = prune_blocks(folder, "none")
    equal = {
        pair.fqn: torch.allclose(found.squares, squares[pair.fqn], rtol=1e-9)
        for pair, found in dense.totals().items()
    }
    assert equal["model.layers.0.self_attn.q_proj.weight"]
    assert not equal["model.layers.1.self_attn.q_proj.weight"]


def test_a_parameter_outside_of_the_blocks_is_refused(folder):
    model = tiny_llama()
    tokenizer = language_models.load_tokenizer(folder / "llama")
    windows = language_models.read_windows(tokenizer, folder / "text.txt", 16, limit=2)
    statistics = ActivationStatistics(prune.select(model, types=torch.nn.Linear, everything=True))
    with pytest.raises(ValueError, match="no decoder layer"):
        language_models.prune_block_by_block(model, windows, statistics, lambda pairs: None)


@pytest.mark.slow
def test_the_root_of_fsdp2_is_sharded_again(folder):
    """An optimizer that is made after a measurement has the shards."""
    assert run_ranks(parameters_after_measuring, 2, folder) == [True, True]


def parameters_after_measuring(folder):
    model = language_models.load_sharded(folder / "llama", wrap="fsdp2")
    before = list(model.parameters())
    tokenizer = language_models.load_tokenizer(folder / "llama")
    windows = language_models.read_windows(tokenizer, folder / "text.txt", 16, limit=2)
    language_models.perplexity(model, windows)
    return all(one is other for one, other in zip(before, model.parameters(), strict=True))
