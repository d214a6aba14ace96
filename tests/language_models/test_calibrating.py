"""Calibration with windows of text: statistics and criteria as of one process, on any ranks."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distprune as prune
from distprune import criteria, language_models, statistics
from distprune.language_models import (
    TextScores,
    TokenWindows,
    calibrate,
    calibrating,
    linear_layers,
)
from distprune.recipes import FROM_GRADIENTS, FROM_STATISTICS
from distprune.statistics import ActivationStatistics, GradientStatistics
from distprune.testing import run_ranks
from helpers.comparisons import raised
from helpers.sampling import every
from helpers.tiny_language_model import tiny_llama, windows_of
from helpers.tiny_transformers import tiny_model
from helpers.wrapped_llamas import wrapped_llama
from helpers.wrappings import whole

pytest.importorskip("transformers")
WRAPPINGS = {"none": 2, "ddp-2": 2, "fsdp2-2": 2, "fsdp2-4": 4, "tp-2": 2, "fsdp2_tp-2x2": 4}


@pytest.fixture(scope="module")
def folder(llama_and_text):
    return llama_and_text


def layers_of(model):
    return prune.select(model, types=nn.Linear, exclude="lm_head")


KINDS = {
    "activations": ActivationStatistics,
    "gradients": GradientStatistics,
    "fisher": partial(criteria.Fisher, unit="rank_batch"),
    "snip": criteria.SNIP,
}


def scores_of(wrapping, folder, kind, count, batch_size):
    """Statistics or scores of each layer, as numbers."""
    torch.set_num_threads(1)
    model = wrapped_llama(tiny_llama(), wrapping)
    collected, seen = KINDS[kind](layers_of(model)), []
    windows = windows_of(folder, count)
    calibrate(model, windows, collected, batch_size=batch_size, progress=seen.append)
    assert seen[-1].num_done == seen[-1].total == count
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    is_criterion = kind in ("fisher", "snip")
    found = collected.scores() if is_criterion else collected.totals()
    if kind == "activations":
        found = {p: torch.stack([t.sums, t.squares, t.sums * 0 + t.num_tokens])
                 for p, t in found.items()}  # fmt: skip
    if kind == "gradients":
        found = {p: torch.tensor([t.weight, *t.by_output, *t.by_input]) for p, t in found.items()}
    return {
        pair.fqn: whole(each).flatten().tolist()
        for pair, each in zip(layers_of(model), found.values(), strict=True)
    }


def closest(found, expected):
    """The largest difference, as a share of the norm."""
    return max(
        float((torch.tensor(found[name]) - torch.tensor(values)).norm())
        / float(torch.tensor(values).norm())
        for name, values in expected.items()
    )


@cache
def scores_of_one_process(folder, kind):
    return run_ranks(scores_of, 1, "none", folder, kind, 5, 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapping", "kind"),
    [
        *((wrapping, "activations") for wrapping in every(2, WRAPPINGS, start=1)),
        *((w, kind) for w in ("ddp-2", "fsdp2-2", "fsdp2-4") for kind in list(KINDS)[1:]),
    ],
)
def test_scores_are_those_of_one_process(folder, wrapping, kind):
    """5 windows: batches of 2, 2 and 1, so that units and ranks have unequal ones, or none."""
    expected = scores_of_one_process(folder, kind)
    for found in run_ranks(scores_of, WRAPPINGS[wrapping], wrapping, folder, kind, 5, 2):
        # Of activations tensor parallelism adds up those of fp32 in another order.
        rounding = 2e-6 if kind != "activations" else 1e-5 if "tp" in wrapping else 1e-12
        assert closest(found, expected) < rounding


def test_scores_of_one_process_are_those_of_a_plain_loop(folder):
    model, windows = tiny_llama().train(), windows_of(folder, 3)
    fisher = criteria.Fisher(layers_of(model), unit="rank_batch")
    snip = criteria.SNIP(layers_of(model))
    for criterion in (fisher, snip):
        calibrate(model, windows, criterion)
    assert model.training and fisher.num_updates == snip.num_updates == 3
    gradients = []
    for row in windows.tokens:
        model.zero_grad()
        model(row[None], labels=row[None]).loss.backward()
        gradients.append([module.weight.grad.clone() for module, _ in layers_of(model)])
    for number, (module, name) in enumerate(layers_of(model)):
        weight = module.weight.detach()
        squares = sum(each[number].square() for each in gradients) / 3
        total = sum(each[number] for each in gradients)
        assert torch.allclose(fisher.scores()[module, name], weight**2 * squares / 2, rtol=1e-5)
        expected = (weight * total).abs()
        assert torch.allclose(snip.scores()[module, name], expected, rtol=1e-5, atol=1e-8)


def test_only_gradients_that_are_read_are_made(folder):
    model, made = tiny_llama(), []
    model.lm_head.weight.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, name=name: made.append(name))
    read_by = layers_of(model)[3:5]
    calibrate(model, windows_of(folder, 1), criteria.SNIP(read_by))
    assert sorted(made) == sorted(pair.fqn for pair in read_by)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["lm_head.weight"]


def test_the_head_runs_only_if_its_statistics_are_wanted(folder):
    model, windows, seen = tiny_llama(), windows_of(folder, 2), []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    calibrate(model, windows, ActivationStatistics(layers_of(model)))
    roberta = tiny_model("roberta_lm")  # in its head, another layer comes before the last one
    for of, layer in ((model, "lm_head.weight"), (roberta, "lm_head.dense.weight")):
        with_head = ActivationStatistics(linear_layers(of, [layer]))
        calibrate(of, windows, with_head)
        assert set(with_head.num_tokens().values()) == {32}
    assert seen == [1, 1, 16, 16]


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "llama4", "gemma4"])
def test_layers_of_families(family):
    """Conv1D and a tied head; fused experts; a router; layers that share keys and values."""
    model = tiny_model(family)
    tokens = torch.randint(3, 40, (3, 8), generator=torch.Generator().manual_seed(0))
    windows = TokenWindows(("text",), tokens, torch.zeros(3, dtype=torch.int64), False)
    layers = linear_layers(model)
    statistics = ActivationStatistics(layers)
    calibrate(model, windows, statistics, batch_size=2)
    attention = [pair.fqn for pair in layers if "attn" in pair.fqn]
    assert len(attention) == {"gpt2": 4, "gemma4": 6}.get(family, 8)
    assert not any("head" in pair.fqn or "router" in pair.fqn for pair in layers)
    assert {statistics.num_tokens()[name] for name in attention} == {24}
    fused = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    seen = [pair.fqn for pair in layers if "experts" in pair.fqn]
    assert seen == (fused if family == "mixtral" else [])
    assert {sum(statistics.num_tokens()[name]) for name in seen} <= {24 * 2}
    assert linear_layers(model, include=["*experts*"]) if seen else True


def test_what_is_not_collected_from_text_is_refused_by_name(folder):
    model, windows = tiny_llama(), windows_of(folder, 2)
    with pytest.raises(TypeError, match="collected is a dict"):
        calibrate(model, windows, {})
    model(windows.tokens, labels=windows.tokens).loss.backward()
    with pytest.raises(RuntimeError, match="has a gradient already"):
        calibrate(model, windows, criteria.SNIP(layers_of(model)))


def test_a_loss_that_is_not_finite_is_named_and_nothing_is_left_behind(folder):
    model, windows = tiny_llama(), windows_of(folder, 3)
    windows.tokens[:2][windows.tokens[:2] == 263] = 5
    windows.tokens[2, 3] = 263
    model.model.embed_tokens.weight.data[263] = float("nan")
    snip = criteria.SNIP(layers_of(model))
    with pytest.raises(ValueError, match=r"the loss of window 2 \(.*text\.txt\) is nan"):
        calibrate(model, windows, snip)
    assert all(parameter.grad is None for parameter in model.parameters())


def collect_unaveraged(folder):
    model = tiny_llama()
    return raised(lambda: calibrate(model, windows_of(folder, 2), criteria.SNIP(layers_of(model))))


def fail_on_one_rank(folder):
    model = tiny_llama()
    statistics = ActivationStatistics(layers_of(model))
    if dist.get_rank():
        model.model.layers[1].mlp = None
    text = raised(lambda: calibrate(model, windows_of(folder, 3), statistics))
    return text, sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.slow
def test_errors_on_ranks(folder):
    for text in run_ranks(collect_unaveraged, 2, folder):
        assert text.startswith("NotImplementedError: SNIP reads averaged gradients, and the model")
    for text, hooks in run_ranks(fail_on_one_rank, 2, folder):
        assert "TypeError: on rank 1: 'NoneType' object is not callable" in text and hooks == 0


# Scores by the names of recipes: each thing that they need is collected once, on any ranks.


def opened(folder):
    """The scores of a model, and how often text ran through it."""
    model = language_models.load_sharded(folder / "llama")
    windows, runs = windows_of(folder, 4), []

    def count(progress):
        if progress.num_done == progress.total:
            runs.append(progress.phase)

    return TextScores(model, windows, prune.select(model), progress=count), runs


def direct(text, score):
    """The scores, collected without names."""
    pairs = text.parameters
    collected = {
        "fisher": statistics.GradientStatistics(pairs),
        "obs": statistics.GramMatrices(pairs),
        "taylor": criteria.Taylor(pairs, unit="rank_batch", power=1),
        "elementwise_fisher": criteria.Fisher(pairs, unit="rank_batch"),
    }.get(score) or statistics.ActivationStatistics(pairs)
    language_models.calibrate(text.model, text.windows, collected)
    is_criterion = score in ("taylor", "elementwise_fisher")
    return collected.scores() if is_criterion else getattr(collected, score)()


def zeros(text, scores):
    """What a pruning by scores leaves, as numbers of pruned weights and masks."""
    prune.global_unstructured(text.parameters, prune.L1Unstructured, scores, amount=0.5)
    masks = [getattr(module, f"{name}_mask") for module, name in text.parameters]
    for module, name in text.parameters:
        prune.remove(module, name)
    return [mask.detach().clone() for mask in masks]


@pytest.mark.filterwarnings("ignore:the ranking over all parameters")
@pytest.mark.parametrize("score", calibrating.SCORES)
def test_a_name_stands_for_what_it_is_made_of(llama_and_text, score):
    text, runs = opened(llama_and_text)
    weights = [getattr(*pair).detach().clone() for pair in text.parameters]
    found = zeros(text, text.of(score))
    assert runs == ["calibrate"]
    for pair, weight in zip(text.parameters, weights, strict=True):
        getattr(*pair).data.copy_(weight)
    expected = zeros(text, direct(text, score))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_all_names_of_recipes_that_need_text_are_known():
    assert {*FROM_STATISTICS, *FROM_GRADIENTS, "obs"} == set(calibrating.SCORES)


def test_what_is_shared_is_collected_once(llama_and_text):
    text, runs = opened(llama_and_text)
    for score in ("wanda", "ria", "stade", "fisher", "fisher", "obs", "obs"):
        text.of(score)
    assert len(runs) == 3
    text.of_round("fisher")  # of the dense model
    assert len(runs) == 3
    text.of_round("wanda")
    assert len(runs) == 4


def test_an_unknown_name_is_an_error(llama_and_text):
    text, _ = opened(llama_and_text)
    with pytest.raises(ValueError, match="score='magnitude'; expected one of wanda"):
        text.of("magnitude")
