"""The same prunings by torch.nn.utils.prune and by distprune, on equal modules, end equally.

Left out on purpose, because torch's behaviour is an accident or a defect:

- A second pruning without a forward before it: torch ranks the weight of the last forward,
  distprune orig * mask as it is now. Here a forward precedes every pruning.
- ``amount=True`` (torch fails in topk) and ``amount=False`` (it takes it for 0), and NaN given to
  a constructor (it fails when it rounds): distprune refuses them at once.
- ``PruningContainer(first, second)``: torch's constructor takes no more than one method.
- What torch leaves of a module when a second pruning fails. distprune leaves it as it was.
- Which of several equal scores goes. Torch has no order for them: when there are ties the
  numbers of pruned elements and their magnitudes are compared, and the sequence ends.
- -0.0 where a negative value is pruned: equal to 0.0 in every comparison here.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from equal_modules import (
    HALF,
    assert_same_modules,
    distinct,
    fill_distinct,
    first_output,
    network,
    on_both,
    twin,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_calls import GOOD_AMOUNTS, OFTEN, STABLE, Step, seeds, sequences
from torch import Tensor, nn

import distprune
from helpers.comparisons import snapshot
from helpers.models import target
from helpers.sampling import num_examples


class Trained:
    """A module in training, by an optimizer that exists before any pruning."""

    def __init__(self, library: Any, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.library, self.module, self.inputs = library, module, inputs
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    def forward(self, *, update: bool) -> None:
        self.module.zero_grad()
        self.loss().backward()
        if update:
            self.optimizer.step()
            self.loss()

    def loss(self) -> Tensor:
        return first_output(self.module(*self.inputs)).float().square().sum()


@settings(STABLE, max_examples=num_examples(550))
@given(sequences(), seeds)
def test_the_same_calls_have_the_same_effects(sequence, seed):
    model, inputs, steps = sequence
    ours = Trained(distprune, twin(model), inputs)
    theirs = Trained(torch_prune, model, inputs)
    for position, step in enumerate(steps):
        for each in (ours, theirs):
            each.forward(update=step.trains_before)
        before = snapshot(ours.module)
        has_ties = _has_ties(step, theirs.module)
        raised = on_both(
            partial(step.run, distprune, ours.module),
            partial(step.run, torch_prune, theirs.module),
            seed + position,
        )
        if raised is not None:
            # From here on torch's module is of no use.
            assert snapshot(ours.module) == before, f"{step} raised {raised} and changed the module"
            return
        if has_ties:
            _assert_equal_up_to_ties(step, ours.module, theirs.module)
            return
        assert_same_modules(ours.module, theirs.module)
    for update in (True, False):
        for each in (ours, theirs):
            each.forward(update=update)
        assert_same_modules(ours.module, theirs.module)
    last = step.names[0]
    on_both(
        lambda: distprune.remove(*target(ours.module, last)),
        lambda: torch_prune.remove(*target(theirs.module, last)),
        seed,
    )
    assert_same_modules(ours.module, theirs.module)
    for each in (ours, theirs):
        each.forward(update=True)
    assert_same_modules(ours.module, theirs.module)


def _is_by_magnitude(step: Step) -> bool:
    return "l1_unstructured" in step.function or step.arguments.get("method") == "L1Unstructured"


def _has_ties(step: Step, model: nn.Module) -> bool:
    """Whether the step may have to choose between equal scores."""
    pairs = [target(model, name) for name in step.names]
    if not all(hasattr(*pair) for pair in pairs):
        return False
    weights = {name: getattr(*pair) for name, pair in zip(step.names, pairs, strict=True)}
    if "random" in step.function or step.arguments.get("method") == "RandomUnstructured":
        return any(weight.dtype in HALF for weight in weights.values())
    live, scores = [], step.scores(model)
    for (name, weight), (module, key) in zip(weights.items(), pairs, strict=True):
        mask = getattr(module, key + "_mask", torch.ones_like(weight))
        values = scores.get(name, weight).detach()
        if values.shape != weight.shape:
            return False
        if step.function == "ln_structured":
            return _has_close_norms(values, mask, step.arguments["n"], step.arguments["dim"])
        live.append(values[mask != 0].abs().double())
    every = torch.cat(live)
    return _is_by_magnitude(step) and every.unique().numel() < every.numel()


def _has_close_norms(values: Tensor, mask: Tensor, n: Any, dim: Any) -> bool:
    """Whether two channels' norms are equal up to the error of a floating-point sum."""
    if not isinstance(dim, int) or not -values.ndim <= dim < values.ndim:
        return False
    if values.ndim < 2:
        return False
    channels = values.double().movedim(dim, 0).flatten(1)
    channels = channels[(mask != 0).movedim(dim, 0).flatten(1).any(1)]
    order = n if isinstance(n, (int, float)) else 2
    norms = torch.linalg.vector_norm(channels, ord=order, dim=1).sort().values
    error = 0.02 if values.dtype in HALF else 1e-5
    return bool((norms.diff() <= error * norms[1:]).any())


def _assert_equal_up_to_ties(step: Step, ours: nn.Module, theirs: nn.Module) -> None:
    scores, gone = step.scores(theirs), ([], [])
    for name in step.names:
        masks = [model.get_buffer(name + "_mask") for model in (ours, theirs)]
        assert masks[0].dtype == masks[1].dtype
        if step.function == "ln_structured":
            dim = step.arguments["dim"]
            channels = [mask.movedim(dim, 0).flatten(1) for mask in masks]
            dead, expected = (int((each == 0).all(1).sum()) for each in channels)
            assert dead == expected
            return
        values = scores.get(name, theirs.get_parameter(name + "_orig")).detach().double().abs()
        for each, mask in zip(gone, masks, strict=True):
            each.append(values[mask == 0])
    pruned, expected = (torch.cat(each).sort().values for each in gone)
    assert len(pruned) == len(expected)
    assert torch.equal(pruned, expected) or not _is_by_magnitude(step)


@settings(STABLE, max_examples=num_examples(150))
@given(
    st.sampled_from(OFTEN),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from(GOOD_AMOUNTS),
    st.sampled_from([1, 2, 3, math.inf]),
    st.integers(-6, 5),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
    st.booleans(),
    seeds,
)
def test_methods_compute_the_same_masks(
    function, shape, amount, n, dim, mask_dtype, in_container, seed
):
    t = distinct(shape, torch.float32, seed)
    default_mask = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    default_mask = default_mask.to(mask_dtype) if in_container else torch.ones(shape)
    name, arguments = {
        "l1_unstructured": ("L1Unstructured", (amount,)),
        "random_unstructured": ("RandomUnstructured", (amount,)),
        "ln_structured": ("LnStructured", (amount, n, dim)),
        "random_structured": ("RandomStructured", (amount, dim)),
    }[function]
    computed = []

    def compute(library):
        method = getattr(library, name)(*arguments)
        method._tensor_name = "weight"
        first = library.Identity()
        first._tensor_name = "weight"
        if in_container:
            container = library.PruningContainer(first)
            container.add_pruning_method(method)
            method = container
        # Copies, because torch's container writes to the default mask.
        computed.append(method.compute_mask(t, default_mask.clone()))
        computed.append(method.prune(t, default_mask.clone()))
        computed.append(method.prune(t, default_mask.clone(), importance_scores=t.flip(0)))

    raised = on_both(lambda: compute(distprune), lambda: compute(torch_prune), seed)
    if raised is not None or (name == "LnStructured" and _close(t, default_mask, n, dim)):
        return
    theirs, ours = computed[:3], computed[3:]
    for mask, expected in zip(ours, theirs, strict=True):
        assert mask.dtype == expected.dtype
        assert torch.equal(mask, expected)


def _close(t: Tensor, mask: Tensor, n: Any, dim: int) -> bool:
    return any(_has_close_norms(values, mask, n, dim) for values in (t, t.flip(0)))


@pytest.mark.parametrize("num_elements", [4097, 70_001, 1_200_003])
@pytest.mark.parametrize("amount", [1, 0.001, 0.5, 0.999])
def test_many_elements(num_elements, amount, device):
    module = nn.Module()
    module.weight = nn.Parameter(distinct([num_elements], torch.float32, seed=1).to(device))
    theirs, ours = module, twin(module)
    for _ in range(2):
        torch_prune.l1_unstructured(theirs, "weight", amount)
        distprune.l1_unstructured(ours, "weight", amount)
        assert_same_modules(ours, theirs)


def test_several_parameters_of_one_module(device):
    theirs = fill_distinct(nn.LSTM(3, 4, 2), torch.float32, seed=0).to(device)
    ours = twin(theirs)
    x = torch.randn(5, 2, 3).to(device)
    for library, module in ((torch_prune, theirs), (distprune, ours)):
        for name in ("weight_ih_l0", "weight_hh_l1", "bias_ih_l0", "weight_ih_l0"):
            library.l1_unstructured(module, name, 0.4)
        library.remove(module, "weight_ih_l0")
        first_output(module(x)).sum().backward()
    assert_same_modules(ours, theirs)


def test_a_mask_of_the_dtype_of_scores_does_not_change_what_comes_after(device):
    """Scores in float64 give torch a float64 mask; the next pruning is one of float32 weights."""
    weight = torch.tensor([[1.0, -3.0], [2.0, 0.5]], device=device)
    results = []
    for library in (distprune, torch_prune):
        module = nn.Linear(2, 2, device=device)
        module.weight.data.copy_(weight)
        library.l1_unstructured(module, "weight", 1)
        library.l1_unstructured(module, "weight", 1, importance_scores=weight.double())
        module(torch.ones(1, 2, device=device))
        torch.manual_seed(0)
        library.random_unstructured(module, "weight", 1)
        next_number = torch.rand(1, device=device)
        results.append((module.weight_mask.dtype, module.weight_mask, next_number))
    (our_dtype, ours, our_next), (their_dtype, theirs, their_next) = results
    assert our_dtype == their_dtype == torch.float32
    assert torch.equal(ours, theirs) and torch.equal(our_next, their_next)


def test_a_mask_of_factors_is_multiplied_in(device):
    theirs = fill_distinct(nn.Linear(4, 3), torch.float32, seed=0).to(device)
    ours = twin(theirs)
    mask = torch.linspace(0, 2, 12, device=device).view(3, 4)
    for library, module in ((torch_prune, theirs), (distprune, ours)):
        library.custom_from_mask(module, "weight", mask)
        module(torch.ones(2, 4, device=device)).sum().backward()
    assert_same_modules(ours, theirs)


# global_unstructured of distprune and of torch.


@pytest.mark.parametrize("amount", [0, 7, 0.5, 1.0])
def test_mixed_dtypes(amount, device):
    dtypes = enumerate((torch.float32, torch.float64, torch.float32))
    layers = [fill_distinct(nn.Linear(4, 5), dtype, seed) for seed, dtype in dtypes]
    theirs = nn.ModuleList(layers).to(device)
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
    "a norm": lambda library, model: library.ln_structured(model[0], "weight", 0, "nuc", 0),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_calls_raise_the_same(call):
    theirs = fill_distinct(network(), torch.float32, seed=0)
    ours = twin(theirs)
    before = snapshot(ours)
    raised = on_both(lambda: call(distprune, ours), lambda: call(torch_prune, theirs), 0)
    assert raised is not None and snapshot(ours) == before


def test_flat_scores_are_accepted(device):
    theirs = fill_distinct(network(), torch.float32, seed=0).to(device)
    ours = twin(theirs)
    for library, model in ((torch_prune, theirs), (distprune, ours)):
        scores = {(model[0], "weight"): distinct([35], torch.float32, seed=9).to(device)}
        pairs = [(model[0], "weight"), (model[2], "weight")]
        library.global_unstructured(pairs, library.L1Unstructured, scores, amount=0.5)
    assert_same_modules(ours, theirs)
