"""global_mask on one process: order, candidates, layouts in memory, and errors."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import distprune as prune
from helpers import reference
from helpers.models import HARD, values
from helpers.sampling import num_examples


def global_mask(tensors, k, **options):
    """global_mask of parameters that have these values; for a mapping, masks by its keys."""
    holder = nn.Module()
    names = list(tensors) if isinstance(tensors, dict) else None
    pairs = []
    for i, tensor in enumerate(tensors.values() if names else tensors):
        holder.register_parameter(f"p{i}", nn.Parameter(tensor, requires_grad=False))
        pairs.append(prune.NamedParameter(holder, f"p{i}", names[i] if names else f"p{i}"))
    found = prune.global_mask(pairs, k, **options)
    masks = dict(zip(names, found.masks, strict=True)) if names else found.masks
    return replace(found, masks=masks)


def expected(tensors, k, candidates=None, *, largest=True, signed=False):
    """The same by the oracle: what is left when all others are pruned."""
    num = sum(t.numel() if candidates is None else int(candidates[i].sum())
              for i, t in enumerate(tensors))  # fmt: skip
    key = float if signed else abs
    kept = reference.prune(tensors, num - k if largest else k, candidates, key)
    if largest:
        return kept
    start = candidates or [torch.ones(t.shape, dtype=torch.bool) for t in tensors]
    return [mask & ~keep for mask, keep in zip(start, kept, strict=True)]


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for mask, other in zip(found, wanted, strict=True):
        assert mask.dtype is torch.bool and torch.equal(mask.cpu(), other)


SHAPES = [(7, 5), (11,), (2, 3, 4), (1,)]


@settings(max_examples=num_examples(400), deadline=None, derandomize=True)
@given(data=st.data())
def test_order_and_candidates(device, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    kind = data.draw(st.sampled_from(HARD), "kind")
    dtypes = [
        data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])) for _ in SHAPES
    ]
    tensors = [values(kind, s, dtype, generator) for s, dtype in zip(SHAPES, dtypes, strict=True)]
    candidates, num = None, sum(tensor.numel() for tensor in tensors)
    if data.draw(st.booleans(), "candidates"):
        share = data.draw(st.sampled_from([0.0, 0.3, 0.9]))
        candidates = [torch.rand(s, generator=generator) < share for s in SHAPES]
        num = sum(int(each.sum()) for each in candidates)
    options = {"largest": data.draw(st.booleans()), "signed": data.draw(st.booleans())}
    k = data.draw(st.integers(0, num), "k")
    found = global_mask(
        [tensor.to(device) for tensor in tensors], k,
        candidates=None if candidates is None else [each.to(device) for each in candidates],
        **options,
    )  # fmt: skip
    assert_equal(found.masks, expected(tensors, k, candidates, **options))


def test_a_count_for_each_tensor():
    tensors = {"a": torch.tensor([3.0, -4.0, 1.0]), "b": torch.tensor([0.1, 0.2])}
    found = global_mask(tensors, [1, 2])
    assert found.masks["a"].tolist() == [False, True, False] and found.masks["b"].all()
    found = global_mask(list(tensors.values()), [2, 0], largest=False)
    assert [mask.tolist() for mask in found.masks] == [[True, False, True], [False, False]]


def test_ties():
    tensors = [torch.ones(4), torch.ones(2)]
    found = global_mask(tensors, 3)
    assert [mask.tolist() for mask in found.masks] == [[False] * 3 + [True], [True, True]]
    assert (found.num_ties, found.num_ties_selected) == (6, 3)
    found = global_mask(tensors, 3, largest=False)
    assert [mask.tolist() for mask in found.masks] == [[True] * 3 + [False], [False, False]]
    assert found.num_ties_selected == 3


def test_scores_stand_for_values():
    tensors = {"a": torch.tensor([[3.0, 2.0], [1.0, 5.0]]), "b": torch.tensor([[9.0, 0.5]])}
    scores = [torch.tensor([[0.0, -8.0], [1.0, 0.0]]), None]
    assert global_mask(tensors, 2, scores=scores).masks["a"].tolist() == [
        [False, True],
        [False, False],
    ]
    signed = global_mask(tensors, 1, scores=scores, signed=True, largest=False)
    assert signed.masks["a"].tolist() == [[False, True], [False, False]]
    factors = [prune.FactoredScores([[torch.tensor([[1.0, 0.0]])]])]
    found = global_mask({"a": tensors["a"]}, 1, scores=factors)
    assert found.masks["a"].tolist() == [[True, False], [False, False]]


def test_random_scores(device):
    tensors = [torch.full((50, 40), math.nan), torch.zeros(300)]
    candidates = [torch.ones(50, 40, dtype=torch.bool), torch.arange(300) < 100]
    torch.manual_seed(3)
    on_cpu = global_mask(tensors, 700, scores="random", candidates=candidates)
    tensors, candidates = ([each.to(device) for each in some] for some in (tensors, candidates))
    torch.manual_seed(3)
    first = global_mask(tensors, 700, scores="random", candidates=candidates)
    other = global_mask(tensors, 700, scores="random", candidates=candidates)
    torch.manual_seed(3)
    again = global_mask(tensors, 700, scores="random", candidates=candidates)
    assert_equal(again.masks, [mask.cpu() for mask in first.masks])
    assert_equal(first.masks, on_cpu.masks)
    assert sum(int(mask.sum()) for mask in first.masks) == 700
    assert not first.masks[1][100:].any() and first.threshold is None
    assert not torch.equal(first.masks[0], other.masks[0])


def strided_tensors():
    base = torch.randn(12, 20, generator=torch.Generator().manual_seed(1))
    yield "transposed", base.t()
    yield "columns", base[:, ::2]
    yield "transposed columns", base[:, ::2].t()
    yield "expanded", base[:1].expand(4, 20)
    yield "channels last", base.view(2, 6, 4, 5).to(memory_format=torch.channels_last)
    yield "0-d", base[0, 0]
    yield "empty", base[:0]


@pytest.mark.parametrize(("name", "tensor"), list(strided_tensors()))
@pytest.mark.parametrize("largest", [True, False])
def test_any_layout_in_memory(name, tensor, largest, device):
    tensor = tensor.to(device)
    k = tensor.numel() // 3
    candidates = [torch.rand(tensor.shape) < 0.7]
    k = min(k, int(candidates[0].sum()))
    found = global_mask([tensor], k, candidates=[candidates[0].to(device)], largest=largest)
    assert_equal(found.masks, expected([tensor], k, candidates, largest=largest))
    assert_equal(
        global_mask([tensor], tensor.numel() // 2, largest=largest).masks,
        expected([tensor], tensor.numel() // 2, largest=largest),
    )


def test_where_it_may_be_called():
    layer = nn.Linear(6, 5, bias=False)
    weight, pairs = layer.weight, [(layer, "weight")]
    with torch.inference_mode():
        masks = prune.global_mask(pairs, 7).masks
    assert not masks[0].is_inference() and not masks[0].requires_grad
    optimizer = torch.optim.SGD([weight], lr=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(prune.global_mask(pairs, 7).masks[0]))
    (weight * weight).sum().backward()
    optimizer.step()
    assert_equal(seen, expected([weight], 7))
    found = prune.global_mask((pair for pair in pairs), 7)
    assert_equal(found.masks, seen)
    # Autograd's version counter has not moved: a graph that was there before still works.
    loss = (weight * weight).sum()
    prune.global_mask(pairs, 7)
    loss.backward()


ONES = torch.ones(2, 3)
WRONG = [
    ([], 1, {}, ValueError, "parameters is empty"),
    ([ONES], 0.5, {}, TypeError, "as an integer"),
    ([ONES], -1, {}, ValueError, "k is -1, and 6"),
    ([ONES], 7, {}, ValueError, "k is 7, and 6 elements compete"),
    ([ONES], 1, {"candidates": {"w": ONES}}, TypeError, "candidates is a dict"),
    ([ONES], 1, {"scores": [ONES, ONES]}, ValueError, "2 scores for 1 parameters"),
    ([ONES], 1, {"scores": [torch.ones(3, 2)]}, ValueError, "scores has shape (3, 2)"),
    ([ONES], 1, {"scores": "l1"}, TypeError, "scores is a str"),
    ([ONES], 1, {"candidates": [ONES]}, TypeError, "expected bool tensors"),
    ([ONES], 1, {"candidates": [torch.ones(2) > 0]}, ValueError, "candidates has shape"),
    ({"w": ONES * math.nan}, 1, {}, ValueError, "the scores of w (6 of 6) are NaN"),
    ({"w": ONES * 1j}, 1, {}, NotImplementedError, "w: scores of dtype torch.comp"),
    ({"w": ONES.to_sparse()}, 1, {}, NotImplementedError, "torch.sparse_coo on the cpu device"),
    ({"w": ONES.to("meta")}, 1, {}, NotImplementedError, "meta device"),
]


@pytest.mark.parametrize(("tensors", "k", "options", "kind", "text"), WRONG)
def test_refused_by_name(tensors, k, options, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        global_mask(tensors, k, **options)


def test_a_parameter_that_is_listed_twice():
    pair = nn.Linear(2, 2), "weight"
    with pytest.raises(ValueError, match="listed twice"):
        prune.global_mask([pair, pair], 1)


def test_a_nan_that_does_not_compete_is_no_error():
    tensor = torch.tensor([1.0, math.nan, 3.0])
    candidates = [torch.tensor([True, False, True])]
    found = global_mask([tensor], 1, candidates=candidates)
    assert found.masks[0].tolist() == [False, False, True]
