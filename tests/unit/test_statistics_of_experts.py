"""Fused experts: the sums of each expert are those of the tokens that came to it."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

import distprune as prune
from distprune.statistics import ActivationStatistics
from helpers.fused_experts import (
    IMPLEMENTATIONS,
    FusedExperts,
    expected,
    experts_net,
    routed,
    tokens_of,
)

FUSED = ("gate_up_proj", "down_proj")


def collect(net, batches, parameters=None):
    statistics = ActivationStatistics(parameters or prune.select(net, names=FUSED))
    with statistics.collecting():
        for batch in batches:
            net(batch)
    return statistics


def assert_equal(totals, reference):
    assert {pair.fqn for pair in totals} == set(reference)
    for pair, found in totals.items():
        num_tokens, sums, squares = reference[pair.fqn]
        assert found.num_tokens == num_tokens, pair.fqn
        assert torch.equal(found.sums, sums) and torch.equal(found.squares, squares), pair.fqn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_are_those_of_a_loop_over_tokens(implementation, dtype):
    parts = [tokens_of(part, dtype=dtype) for part in range(3)]
    statistics = collect(experts_net(implementation, dtype), parts)
    reference = expected(experts_net(dtype=dtype), parts)
    assert_equal(statistics.totals(), reference)
    assert statistics.num_tokens() == {name: found[0] for name, found in reference.items()}
    assert reference["second.down_proj"][0][-1] == 0 < min(reference["first.down_proj"][0])


def test_files_keep_the_tokens_of_each_expert(tmp_path):
    parts = [tokens_of(part) for part in range(3)]
    statistics = collect(experts_net(), parts)
    statistics.save(tmp_path / "a.safetensors")
    net = experts_net()
    loaded = ActivationStatistics.load(tmp_path / "a.safetensors", prune.select(net, names=FUSED))
    assert_equal(loaded.totals(), expected(net, parts))
    with loaded.collecting():
        net(tokens_of(3))
    assert_equal(loaded.totals(), expected(net, [*parts, tokens_of(3)]))
    linear = nn.Module()
    linear.first = FusedExperts(is_transposed=True)
    with pytest.raises(ValueError, match=r"first\.gate_up_proj: .*experts.*transposed_experts"):
        ActivationStatistics.load(
            tmp_path / "a.safetensors", prune.select(linear, names="gate_up_proj")
        )


class Broken(FusedExperts):
    """Experts that use their weight in another way."""

    def __init__(self, use):
        super().__init__()
        self.use = use

    def forward(self, hidden, experts):
        return self.use(self, hidden, experts)


def gathered(self, hidden, experts):
    return torch.bmm(self.gate_up_proj[experts[:, 0]], hidden.unsqueeze(-1))


def halves(self, hidden, experts):
    return functional.linear(hidden, self.gate_up_proj[0, :8])


def between(self, hidden, experts):
    return functional.linear(hidden, self.gate_up_proj.view(-1, 8)[1:17])


def as_other_side(self, hidden, experts):
    return functional.linear(torch.ones(3, 16), self.gate_up_proj[0].T)


def all_at_once(self, hidden, experts):
    return torch.einsum("eoi,ti->teo", self.gate_up_proj, hidden)


def hidden_from_torch(self, hidden, experts):
    return hidden.numpy() @ self.gate_up_proj[0].detach().numpy().T


def never(self, hidden, experts):
    return hidden


def halved(self, hidden, experts):
    return functional.linear(hidden, self.gate_up_proj[0].half().float())


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (gathered, r"__getitem__ uses the weight of fused experts"),
        (halves, r"linear uses the weight"),
        (between, r"linear uses the weight"),
        (as_other_side, r"uses the weight"),
        (all_at_once, r"uses the weight"),
        (hidden_from_torch, r"in no way that is seen"),
        (never, r"with 7 tokens.*in no way that is seen.*set_experts_implementation"),
        (halved, r"half uses the weight"),
    ],
)
def test_other_uses_of_the_weight_are_refused_by_name(use, text):
    net = nn.ModuleDict({"experts": Broken(use)})
    statistics = ActivationStatistics(prune.select(net, names="gate_up_proj"))
    hidden = tokens_of(1)
    with statistics.collecting():
        with (
            warnings.catch_warnings(),
            pytest.raises(NotImplementedError, match=r"experts\.gate_up_proj.*" + text),
        ):
            warnings.simplefilter("error")
            net["experts"](hidden, routed(hidden, 4))
        assert not _get_current_function_mode_stack()
    assert not net["experts"]._forward_hooks and not net["experts"]._forward_pre_hooks


def test_a_forward_that_is_interrupted_leaves_no_mode_behind():
    def interrupt(self, hidden, experts):
        raise KeyboardInterrupt

    net = Broken(interrupt)
    statistics = ActivationStatistics([(net, "gate_up_proj")])
    with pytest.raises(KeyboardInterrupt), statistics.collecting():
        net(tokens_of(1), None)
    assert not _get_current_function_mode_stack()


def test_part_of_a_batch_cannot_be_left_out():
    net, tokens = experts_net(), tokens_of(1)
    statistics = ActivationStatistics(prune.select(net, names=FUSED))
    mask = torch.ones(1, len(tokens), dtype=torch.int64)
    with statistics.collecting(), statistics.batch(mask):
        net(tokens)
    with statistics.collecting(), statistics.batch(torch.zeros_like(mask)):
        net(tokens_of(2))
    assert_equal(statistics.totals(), expected(net, [tokens]))
    mask[0, 2] = 0
    with (
        statistics.collecting(),
        statistics.batch(mask),
        pytest.raises(NotImplementedError, match=r"first\.gate_up_proj: .*attention_mask"),
    ):
        net(tokens)


def test_what_is_not_whole_is_refused():
    net, tokens = experts_net(), tokens_of(1)
    net.first._is_expert_parallel = True
    statistics = ActivationStatistics(prune.select(net, names=FUSED))
    with statistics.collecting(), pytest.raises(NotImplementedError, match="expert parallelism"):
        net(tokens)
    with contextlib.suppress(AttributeError):
        del net.first.is_transposed
    with pytest.raises(NotImplementedError, match=r"first\.gate_up_proj \(.*: what is multiplied"):
        ActivationStatistics(prune.select(net, names=FUSED))


def test_experts_that_no_token_came_to_at_all_need_leave():
    net = experts_net()
    statistics = ActivationStatistics(prune.select(net, names=FUSED))
    with statistics.collecting():
        net(torch.zeros(0, 8))
    with pytest.raises(ValueError, match=r"first\.gate_up_proj.*not called"):
        statistics.totals()
    allowed = ActivationStatistics(prune.select(net, names=FUSED), allow_empty="*")
    with pytest.warns(UserWarning, match=r"first\.gate_up_proj, .*\(16 of 16 matrices"):
        assert all(bool((s.terms[0][0] == 1).all()) for s in allowed.wanda().values())


def test_rows_after_the_last_bound_count_for_nobody():
    net = FusedExperts(implementation="grouped_mm")
    nn.init.ones_(net.gate_up_proj)

    def forward(hidden, offsets):
        net.grouped(hidden, "gate_up_proj", offsets)
        return hidden

    net.forward = forward
    statistics = ActivationStatistics([(net, "gate_up_proj")])
    rows = torch.full((7, 8), float("nan"))
    rows[:4] = torch.arange(4.0).view(4, 1)
    with statistics.collecting():
        net(rows, torch.tensor([1, 1, 4, 4], dtype=torch.int32))
    (found,) = statistics.totals().values()
    assert found.num_tokens == (1, 0, 3, 0)
    assert found.sums[:, 0].tolist() == [0, 0, 6, 0]
    assert found.squares[:, 5].tolist() == [0, 0, 14, 0]
