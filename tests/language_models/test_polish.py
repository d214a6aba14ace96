"""Polishing: the gradient of the divergence, zeros that are held, and the same on ranks."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional

import distprune as prune
from distprune import criteria, language_models
from distprune.language_models.losses import BatchLosses
from distprune.language_models.polishing import polishing_steps
from distprune.testing import run_ranks
from helpers.tiny_language_model import tiny_llama, tiny_tokenizer, windows_of
from helpers.wrappings import whole, wrap


def polished(folder, wrap="none", steps=7, batch_size=3):
    """(whole weights before and after, losses) of a model at 50 %."""
    model = language_models.load_sharded(folder / "llama", wrap=wrap, dtype=torch.float32)
    dense = language_models.load_sharded(folder / "llama", wrap=wrap, dtype=torch.float32)
    parameters = language_models.linear_layers(model)
    prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.5)

    def weights():
        return [whole(getattr(*pair)).clone() for pair in parameters]

    before = weights()
    losses = language_models.polish(
        model, dense, windows_of(folder, 6), parameters, steps=steps, lr=0.02, batch_size=batch_size
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))  # hooks make the weights of masks
    return before, weights(), losses


@pytest.fixture(scope="module")
def polished_alone(llama_and_text):
    return polished(llama_and_text)


def test_zeros_are_held_and_the_loss_falls(llama_and_text):
    before, after, losses = polished(llama_and_text, steps=40)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one == 0, other == 0) and not torch.equal(one, other)


@pytest.mark.parametrize("in_slices", [True, False])
def test_the_divergence_is_that_of_whole_logits(llama_and_text, in_slices):
    """Its value and all gradients, of the head too."""
    torch.manual_seed(0)
    dense, tokens = tiny_llama(), windows_of(llama_and_text, 6).tokens[:2]
    model = copy.deepcopy(dense)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.mul_(0.5)
    log_q, log_p = (m(input_ids=tokens).logits[:, :-1].log_softmax(-1) for m in (model, dense))
    right = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    right.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    target = BatchLosses(dense).prediction(tokens)
    assert not target[1]
    if not in_slices:
        target = (dense(input_ids=tokens).logits.detach(), True)
    loss = BatchLosses(model).divergence(tokens, target)
    loss.backward()
    assert torch.allclose(loss, right, atol=1e-6)
    for name, parameter in model.named_parameters():
        if "lm_head" not in name or not in_slices:  # in slices, the head is that of both
            assert torch.allclose(parameter.grad, expected[name], atol=1e-6), name


def test_a_step_is_one_of_adam_without_momentum(llama_and_text):
    """Two windows, one of each text in turn; the norm clipped to 1, and the rate warmed up."""
    dense, text = tiny_llama(), windows_of(llama_and_text, 3)
    both = text + language_models.write_text(dense, tiny_tokenizer(), windows=3, length=16)
    model = copy.deepcopy(dense)
    pairs = prune.select(model.model.layers[0].mlp, types=torch.nn.Linear)
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
    by_hand = copy.deepcopy(model)
    language_models.polish(model, dense, both, pairs, steps=1, lr=0.02)
    tokens = both.tokens[[0, 3]]
    log_q, log_p = (m(input_ids=tokens).logits[:, :-1].log_softmax(-1) for m in (by_hand, dense))
    functional.kl_div(log_q, log_p.detach(), log_target=True, reduction="sum").div(30).backward()
    mlp = list(by_hand.model.layers[0].mlp.children())[:3]
    trained = [m.weight_orig for m in mlp]
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    rms = torch.cat([m.weight[m.weight != 0] for m in mlp]).square().mean().sqrt().item()
    torch.optim.AdamW(trained, 0.02 / 5 * rms, (0.0, 0.95), 1e-8 / 0.05**0.5, 0).step()
    for right, (module, _) in zip(trained, pairs, strict=True):
        assert torch.allclose(right, module.weight_orig, atol=1e-7)


def test_autocast_computes_with_the_weights_of_each_step(llama_and_text):
    """Autocast keeps what it has made of weights until it ends."""
    made = []
    for keeps in (True, False):
        dense = tiny_llama()
        model = copy.deepcopy(dense)
        pairs = prune.select(model)
        for module, name in pairs:
            getattr(module, name).data.mul_(1.5)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
            losses = language_models.polish(model, dense, windows_of(llama_and_text, 6), pairs)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        made.append((losses, [getattr(*pair).tolist() for pair in pairs]))
    assert made[0] == made[1] and losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "num_ranks"), [("none", 2), ("ddp", 2), ("fsdp2", 2), ("tp", 2)])
def test_ranks_do_what_one_process_does(llama_and_text, polished_alone, wrap, num_ranks):
    """Three windows a step do not divide among two ranks."""
    before, after, losses = polished_alone
    for others, found, of_ranks in run_ranks(polished, num_ranks, llama_and_text, wrap):
        assert all(map(torch.equal, before, others))
        assert torch.allclose(torch.tensor(losses), torch.tensor(of_ranks), rtol=0.02)
        for one, other in zip(after, found, strict=True):
            assert torch.equal(one == 0, other == 0)
            assert torch.allclose(one, other, atol=2e-4)


def of_squares(folder):
    """What a step under FSDP1 has of the sum of squared clipped gradients, on this rank."""
    model, windows, state = tiny_llama(), windows_of(folder, 2), {}
    model.lm_head.weight.data.mul_(1000)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(2)
    model, dense = (wrap(each, "fsdp1_root-2") for each in (model, tiny_llama()))

    def loss_of(row):
        tokens = windows.tokens[row : row + 1]
        return BatchLosses(model).divergence(tokens, BatchLosses(dense).prediction(tokens))

    next(polishing_steps(model, loss_of, windows, prune.select(model), steps=1, state=state))
    return float(sum(s["square_avg"].sum() for s in state["optimizer"]["state"].values()))


def test_gradients_are_clipped_by_the_norm_over_the_ranks_of_fsdp1(llama_and_text):
    assert sum(run_ranks(of_squares, 2, llama_and_text)) == pytest.approx(0.05, rel=1e-5)


def test_a_loss_that_is_not_finite_changes_nothing(llama_and_text):
    dense, windows = tiny_llama(), windows_of(llama_and_text, 6)
    model = copy.deepcopy(dense)
    pairs = language_models.linear_layers(model)
    model.model.norm.weight.data[0] = torch.inf
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="loss of step 0 is nan; expected finite losses"):
        language_models.polish(model, dense, windows, pairs)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="steps=0, batch_size=2"):
        language_models.polish(model, dense, windows, pairs, steps=0)


# Pruning in rounds: scores of the present model, exact counts, zeros that stay.


SPARSITIES = [0.25, 0.5, 0.625]


def run(folder, wrap="none", finished=0, model=None):
    """(zeros after each round, errors of each update, whole weights), and the model."""
    model = model or language_models.load_sharded(folder / "llama", wrap=wrap)
    windows = windows_of(folder, 4)
    parameters = language_models.linear_layers(model)

    def score():
        fisher = criteria.Fisher(parameters, unit="rank_batch")
        language_models.calibrate(model, windows, fisher)
        return fisher.scores()

    rounds = language_models.prune_in_rounds(
        model, windows, parameters, SPARSITIES, score, finished=finished
    )
    zeros, errors = [], []
    for pruning, update in rounds:
        zeros.append([row.num_pruned for row in pruning.parameters])
        errors += [(row.error_before, row.error_after) for row in update.parameters]
    return zeros, errors, [whole(getattr(*pair)) for pair in parameters], model


def on_ranks(folder, wrap):
    return run(folder, wrap)[:3]


@pytest.fixture(scope="module")
def run_alone(llama_and_text):
    return run(llama_and_text)


def test_counts_are_exact_and_zeros_stay(run_alone):
    zeros, errors, weights, _ = run_alone
    total = sum(weight.numel() for weight in weights)
    assert [sum(of_round) for of_round in zeros] == [round(s * total) for s in SPARSITIES]
    for first, then in itertools.pairwise(zeros):
        assert all(a <= b for a, b in zip(first, then, strict=True))
    assert sum(int((weight == 0).sum()) for weight in weights) == sum(zeros[-1])
    assert all(after <= before for before, after in errors)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["fsdp2"])
def test_ranks_prune_what_one_process_prunes(llama_and_text, run_alone, wrap):
    """Scores agree to rounding, and no mask differs here; each round adds rounding to weights."""
    zeros, _, weights, _ = run_alone
    for found, _, others in run_ranks(on_ranks, 2, llama_and_text, wrap):
        assert found == zeros
        for one, other in zip(weights, others, strict=True):
            assert torch.equal(one == 0, other == 0)
            assert (one - other).abs().max() <= 1e-4 * one.abs().max()


def test_finished_rounds_are_not_run_again(llama_and_text, run_alone):
    _, _, weights, model = run_alone
    zeros, errors, again, _ = run(llama_and_text, finished=len(SPARSITIES), model=model)
    assert not zeros and not errors
    assert all(torch.equal(one, other) for one, other in zip(weights, again, strict=True))


@pytest.mark.parametrize("sparsities", [[], [0.5, 0.5], [0.5, 0.4], [0.5, 1.0], [-0.1]])
def test_sparsities_rise(llama_and_text, sparsities):
    model = language_models.load_sharded(llama_and_text / "llama", wrap="none")
    parameters = prune.select(model)
    with pytest.raises(ValueError, match="sparsities="):
        list(language_models.prune_in_rounds(model, None, parameters, sparsities, dict))
