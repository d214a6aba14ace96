"""global_unstructured of distprune and of torch, alone and mixed with other prunings."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from equal_modules import HALF, assert_same_modules, distinct, fill_distinct, on_both, twin
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_calls import BAD_AMOUNTS, GOOD_AMOUNTS, STABLE
from torch import nn

import distprune
from helpers.comparisons import bits, snapshot
from helpers.sampling import num_examples

PLACES = [(0, "weight"), (0, "bias"), (1, "weight"), (2, "weight"), (2, "bias")]


def network(dtype: torch.dtype, seed: int) -> nn.Module:
    layers = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    return fill_distinct(layers, dtype, seed)


def refresh(model: nn.Module, update: bool) -> None:
    """A training step, and a forward so that torch ranks the present weights."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    model.zero_grad()
    model(x).float().square().sum().backward()
    if update:
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model(x)


methods = st.sampled_from(["L1Unstructured"] * 4 + ["RandomUnstructured"] * 2 + ["Identity"])


@settings(STABLE, max_examples=num_examples(150))
@given(
    st.sampled_from([torch.float32, torch.float32, torch.float64, *HALF]),
    st.lists(
        st.tuples(
            methods,
            st.lists(st.sampled_from(PLACES), min_size=1, unique=True),
            st.sampled_from(GOOD_AMOUNTS * 3 + BAD_AMOUNTS),
            st.lists(st.sampled_from(PLACES), unique=True),
            st.booleans(),
            st.sampled_from([None, None, "l1_unstructured", "random_unstructured"]),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 10**6),
)
def test_the_same_calls_have_the_same_effects(dtype, calls, seed):
    theirs = network(dtype, seed)
    ours = twin(theirs)
    for method, places, amount, scored, update, local_function in calls:
        for model in (ours, theirs):
            refresh(model, update)
        if local_function is not None and dtype not in HALF:
            for library, model in ((distprune, ours), (torch_prune, theirs)):
                torch.manual_seed(seed)
                getattr(library, local_function)(model[0], "weight", 0.2)
                refresh(model, update=False)
        before = snapshot(ours)
        has_ties = _has_ties(theirs, places, scored, method)

        run = partial(_prune, method=method, places=places, amount=amount, scored=scored)
        if not set(scored) <= set(places):
            # A deliberate difference: torch takes no notice of scores that it does not need.
            with pytest.raises((ValueError, TypeError)):
                run(distprune, ours)
            assert snapshot(ours) == before
            return
        raised = on_both(partial(run, distprune, ours), partial(run, torch_prune, theirs), seed)
        if raised is not None:
            assert snapshot(ours) == before
            return
        if has_ties:
            assert _num_pruned(ours) == _num_pruned(theirs)
            return
        assert_same_modules(ours, theirs)
    for model in (ours, theirs):
        refresh(model, update=True)
        refresh(model, update=True)
    assert_same_modules(ours, theirs)


def _prune(
    library: Any, model: nn.Module, *, method: str, places: list, amount: Any, scored: list
) -> None:
    library.global_unstructured(
        [(model[i], name) for i, name in places],
        getattr(library, method),
        importance_scores=_scores(model, scored),
        **({} if method == "Identity" else {"amount": amount}),
    )


def _scores(model: nn.Module, places: list[tuple[int, str]]) -> dict | None:
    if not places:
        return None
    return {
        (model[i], name): distinct(getattr(model[i], name).shape, torch.float32, seed=i)
        for i, name in places
    }


def _has_ties(model: nn.Module, places: list, scored: list, method: str) -> bool:
    dtypes = {getattr(model[i], name).dtype for i, name in places}
    if method != "L1Unstructured":
        return bool(dtypes & set(HALF))
    scores = _scores(model, scored) or {}
    live = []
    for i, name in places:
        values = getattr(model[i], name)
        mask = getattr(model[i], name + "_mask", torch.ones_like(values))
        live.append(scores.get((model[i], name), values).detach()[mask != 0].abs().double())
    every = torch.cat(live)
    return every.unique().numel() < every.numel()


def _num_pruned(model: nn.Module) -> int:
    return sum(int((buffer == 0).sum()) for buffer in model.buffers())


@pytest.mark.parametrize("amount", [0, 7, 0.5, 1.0])
def test_mixed_dtypes(amount, device):
    theirs = nn.ModuleList(
        [
            fill_distinct(nn.Linear(4, 5), torch.float32, 0),
            fill_distinct(nn.Linear(4, 5), torch.float64, 1),
            fill_distinct(nn.Linear(4, 5), torch.float32, 2),
        ]
    ).to(device)
    with torch.no_grad():
        theirs[1].weight.mul_(1.01)
        theirs[2].weight.mul_(1.03)
    ours = twin(theirs)
    for library, model in ((torch_prune, theirs), (distprune, ours)):
        for _ in range(2):
            library.global_unstructured(
                [(layer, "weight") for layer in model], library.L1Unstructured, amount=amount
            )
    assert_same_modules(ours, theirs)


def calling(pairs, method="L1Unstructured", scores=None, **arguments):
    """A call on pairs of a model, and with methods of either library."""

    def call(library: Any, model: nn.Module) -> None:
        chosen = [(model[i], name) for i, name in pairs] if isinstance(pairs, list) else pairs
        library.global_unstructured(chosen, getattr(library, method), scores, **arguments)

    return call


FIRST = [(0, "weight")]
WRONG = {
    "no parameters": calling([], amount=1),
    "not iterable": calling(3, amount=1),
    "structured": calling(FIRST, "RandomStructured", amount=1, dim=0),
    "no amount": calling(FIRST),
    "an unknown argument": calling(FIRST, amount=1, n=2),
    "scores in a list": calling(FIRST, scores=[torch.ones(5, 7)], amount=1),
    "a missing name": calling([*FIRST, (1, "weights")], amount=1),
    "more than there is": calling([*FIRST, (2, "weight")], amount=51),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_calls_raise_the_same(call):
    theirs = network(torch.float32, seed=0)
    ours = twin(theirs)
    before = snapshot(ours)
    raised = on_both(lambda: call(distprune, ours), lambda: call(torch_prune, theirs), 0)
    assert raised is not None
    assert snapshot(ours) == before


def test_flat_scores_are_accepted(device):
    theirs = network(torch.float32, seed=0).to(device)
    ours = twin(theirs)
    for library, model in ((torch_prune, theirs), (distprune, ours)):
        scores = {(model[0], "weight"): distinct([35], torch.float32, seed=9).to(device)}
        pairs = [(model[0], "weight"), (model[2], "weight")]
        library.global_unstructured(pairs, library.L1Unstructured, scores, amount=0.5)
    assert_same_modules(ours, theirs)


def test_hooks_hold_the_chosen_mask():
    model = network(torch.float32, seed=0)
    pairs = [(model[0], "weight"), (model[2], "weight")]
    for amount in (10, 0.5):
        distprune.global_unstructured(pairs, distprune.L1Unstructured, amount=amount)
        for module, _ in pairs:
            (hook,) = module._forward_pre_hooks.values()
            method = hook[-1] if isinstance(hook, distprune.PruningContainer) else hook
            assert isinstance(method, distprune.CustomFromMask)
            assert bits(method.mask) == bits(module.weight_mask)
