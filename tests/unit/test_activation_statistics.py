"""What ActivationStatistics adds up on one process, against sums over an unfolded input."""

import contextlib
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import distprune as prune
from distprune.statistics import ActivationStatistics
from helpers.collecting import collected, unfolded
from helpers.fused_experts import (
    IMPLEMENTATIONS,
    FusedExperts,
    expected,
    experts_net,
    routed,
    tokens_of,
)

SEED = 7


def collect(model: nn.Module, *batches: Tensor, **options) -> ActivationStatistics:
    statistics = ActivationStatistics(prune.select(model, everything=True), **options)
    return collected(statistics, model, *batches)


def only(statistics: ActivationStatistics):
    (totals,) = statistics.totals().values()
    return totals


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(SEED)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 5), (0, 5), (2, 2, 2, 5)])
def test_linear(dtype, shape):
    layer, x = nn.Linear(5, 3).to(dtype), integers(*shape, dtype=dtype)
    batches = [x, integers(4, 5, dtype=dtype)]
    totals = only(collect(layer, *batches))
    num_tokens, sums, squares = 0, [0.0] * 5, [0.0] * 5
    for batch in batches:
        for token in batch.reshape(-1, 5).tolist():
            num_tokens += 1
            for feature, value in enumerate(token):
                sums[feature] += value
                squares[feature] += value * value
    assert totals.num_tokens == num_tokens
    assert totals.sums.tolist() == sums and totals.squares.tolist() == squares
    assert totals.sums.dtype == totals.squares.dtype == torch.float64


def test_squares_that_would_overflow_and_sums_that_would_be_rounded():
    layer = nn.Linear(1, 1).half()
    totals = only(collect(layer, torch.full((3, 1), 65504.0, dtype=torch.float16)))
    assert totals.squares.item() == 3 * 65504.0**2  # fp16 ends at 65504
    layer = nn.Linear(1, 1).bfloat16()
    totals = only(collect(layer, torch.full((10001, 1), 1.0, dtype=torch.bfloat16)))
    assert totals.sums.item() == 10001  # bf16 would stay at 256
    totals = only(collect(layer, torch.full((2, 1), 2.0**127, dtype=torch.bfloat16)))
    assert totals.squares.item() == 2.0**255  # fp32 ends below 2**128


def test_chunks_add_up_to_the_whole():
    x = integers(70_000, 5)  # several chunks
    totals = only(collect(nn.Linear(5, 2), x))
    assert torch.equal(totals.sums, x.double().sum(0))
    assert torch.equal(totals.squares, x.double().square().sum(0))


CONVOLUTIONS = [
    {},
    {"stride": 2, "padding": 1},
    {"padding": "same", "dilation": 2},
    {"padding": "same", "kernel_size": 4},  # an uneven padding: one more after than before
    {"padding": "valid", "stride": 3},
    {"padding": 2, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "circular", "stride": 2},
    {"padding": 2, "padding_mode": "replicate", "dilation": 2},
    {"groups": 2, "padding": 1},
    {"groups": 4, "out_channels": 8},  # depthwise
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
@pytest.mark.parametrize("is_batched", [True, False])
def test_convolutions_see_the_columns_of_the_unfolded_input(kind, options, is_batched):
    options = {"out_channels": 6, "kernel_size": 3, **options}
    if kind is nn.Conv2d and isinstance(options["kernel_size"], int):
        options["kernel_size"] = (options["kernel_size"], 2)
    torch.manual_seed(SEED)
    layer = kind(4, **options).double()
    x = integers(*((3,) if is_batched else ()), 4, *((9, 8) if kind is nn.Conv2d else (9,)))
    totals = only(collect(layer, x.double()))
    columns = unfolded(layer, x.double() if is_batched else x.double().unsqueeze(0))
    with torch.no_grad():  # the columns are those that the weight meets
        per_group = columns.view(len(columns), layer.groups, -1)
        weights = layer.weight.view(layer.groups, layer.out_channels // layer.groups, -1)
        outputs = torch.einsum("tgi,goi->tgo", per_group, weights).reshape(len(columns), -1)
        expected = layer(x.double()) - layer.bias.view(-1, *[1] * len(layer.kernel_size))
        expected = expected.movedim(-1 - len(layer.kernel_size), -1).reshape(outputs.shape)
    assert torch.allclose(outputs, expected)
    assert totals.num_tokens == len(columns)
    assert totals.sums.shape == totals.squares.shape == (4, *layer.kernel_size)
    assert torch.equal(totals.sums.view(-1), columns.sum(0))
    assert torch.equal(totals.squares.view(-1), columns.square().sum(0))


def test_a_tied_weight_has_the_sums_of_both_uses():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    with torch.no_grad():
        model[0].weight.copy_(integers(3, 3))
    x = integers(5, 3)
    totals = only(collect(model, x))
    second = torch.relu(x @ model[0].weight.T)
    assert totals.num_tokens == 10
    assert torch.equal(totals.squares, (x.double().square() + second.double().square()).sum(0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("is_flat", [False, True])
def test_padding_does_not_count(dtype, is_flat):
    x, mask = integers(2, 4, 3), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).to(dtype)
    x[~mask.bool()] = float("nan")  # as some models leave it
    layer = nn.Linear(3, 2)
    statistics = ActivationStatistics([(layer, "weight")])
    with statistics.collecting():
        with statistics.batch(attention_mask=mask):
            layer(x.flatten(0, 1) if is_flat else x)
        layer(integers(1, 3))
    totals = only(statistics)
    kept = torch.cat([x[mask.bool()], integers(1, 3)]).double()
    assert totals.num_tokens == 6
    assert torch.equal(totals.sums, kept.sum(0))
    assert torch.equal(totals.squares, kept.square().sum(0))


@pytest.mark.parametrize(
    ("layer", "shape", "error", "text"),
    [
        *(
            (nn.Linear(3, 2), shape, ValueError, r"attention_mask of shape \(2, 4\)")
            for shape in [(2, 3), (4, 2, 3), (2, 5, 3), (7, 3)]
        ),
        (nn.Conv1d(3, 2, 2), (2, 3, 4), NotImplementedError, "convolution"),
    ],
)
def test_an_input_that_does_not_fit_the_mask_is_refused_by_name(layer, shape, error, text):
    model = nn.Sequential(layer)
    statistics = ActivationStatistics(prune.select(model))
    with (
        statistics.collecting(),
        statistics.batch(torch.ones(2, 4, dtype=torch.bool)),
        pytest.raises(error, match=rf"0\.weight.*{text}"),
    ):
        model(torch.ones(shape))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, 4))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.MultiheadAttention(4, 2).out_proj, "weight"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight"),
        (nn.Embedding(3, 2), "weight"),
        (Experts(), "weight"),
        (Doubled(3, 2), "weight"),
        (nn.Linear(3, 2), "bias"),
        (nn.Bilinear(2, 2, 2), "weight"),
        (nn.Conv3d(2, 2, 2), "weight"),
        (nn.ConvTranspose1d(2, 2, 2), "weight"),
    ],
)
def test_a_layer_whose_input_is_not_seen_is_refused_by_name(module, name):
    pair = prune.NamedParameter(module, name, "model.layer.weight")
    text = rf"model\.layer\.weight \({name} of {type(module).__name__}\): what is multiplied"
    with pytest.raises(NotImplementedError, match=text):
        ActivationStatistics([pair])


def test_a_layer_that_is_never_called_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    statistics = ActivationStatistics(prune.select(model))
    collected(statistics, model[0], torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"1\.weight: the layer was not called"):
        statistics.totals()
    assert statistics.num_tokens([(model[0], "weight")]) == {"0.weight": 2}
    collected(statistics, model[1], torch.ones(1, 3))
    assert statistics.num_tokens() == {"0.weight": 2, "1.weight": 1}


def test_an_expert_without_tokens_is_allowed_when_asked_for():
    model = nn.ModuleDict({"expert": nn.Linear(3, 3), "other": nn.Linear(3, 3)})
    for shape in (None, (0, 3)):
        statistics = ActivationStatistics(prune.select(model), allow_empty="expert")
        with statistics.collecting():
            model["other"](torch.ones(2, 3))
            if shape:
                model["expert"](torch.ones(shape))
        assert statistics.num_tokens() == {"expert.weight": 0, "other.weight": 2}


@pytest.mark.parametrize("pattern", ["experts.*", "re:(", "re:other"])
def test_a_pattern_that_matches_nothing_is_refused(pattern):
    with pytest.raises(ValueError, match=r"allow_empty|missing|unterminated"):
        ActivationStatistics(prune.select(nn.Sequential(nn.Linear(3, 3))), allow_empty=pattern)


def test_hooks_change_nothing_and_are_removed():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    expected = model(torch.ones(2, 3))
    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        assert torch.equal(model(torch.ones(2, 3)), expected)
    assert not any(layer._forward_pre_hooks for layer in model.modules())
    assert torch.is_grad_enabled()
    with statistics.collecting():
        model[2](input=model[0](input=torch.ones(2, 3)))  # by keyword, and the context once more
    assert statistics.num_tokens() == {"0.weight": 4, "2.weight": 4}


def test_gradients_are_off_and_checkpointed_layers_count_once():
    layer = nn.Linear(3, 2)
    statistics = ActivationStatistics([(layer, "weight")])
    x = torch.ones(2, 3, requires_grad=True)
    with statistics.collecting():
        assert not checkpoint(layer, x, use_reentrant=False).requires_grad
    assert only(statistics).num_tokens == 2
    with (
        statistics.collecting(),
        torch.enable_grad(),
        pytest.raises(RuntimeError, match="gradients enabled"),
    ):
        checkpoint(layer, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inside_and_outside_of_inference_mode(mode):
    layer = nn.Linear(3, 2)
    statistics = ActivationStatistics([(layer, "weight")])
    with mode(), statistics.collecting():
        layer(torch.ones(2, 3))
    with statistics.collecting():
        layer(torch.ones(1, 3))
        with mode():
            layer(torch.ones(1, 3))
    assert only(statistics).sums.tolist() == [4.0] * 3


def test_autocast_does_not_round_the_sums():
    layer = nn.Linear(1, 2)
    statistics = ActivationStatistics([(layer, "weight")])
    x = torch.tensor([[1.0 + 2**-20]])
    with statistics.collecting(), torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert only(statistics).squares.item() == (1 + 2**-20) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("is_layer", [False, True])
def test_compiled_models_run_uncompiled_and_are_counted(is_layer):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    compiled = model
    if is_layer:
        model[0].compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    x = integers(4, 3)
    with torch.no_grad():
        compiled(x)  # a graph without hooks
    statistics = collected(ActivationStatistics(prune.select(compiled)), compiled, x)
    assert torch.equal(only(statistics).sums, x.double().sum(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused_by_name(value):
    model = nn.Sequential(nn.Linear(2, 2))
    statistics = collect(model, torch.tensor([[1.0, value]]))
    with pytest.raises(ValueError, match=r"0\.weight.*not finite"):
        statistics.totals()


class Failing(nn.Module):
    """Two layers; fails between them when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.error is not None:
            raise self.error
        return self.second(x)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("is_caught_inside", [False, True])
def test_after_a_forward_that_raised_new_statistics_are_needed(error, is_caught_inside, tmp_path):
    model = Failing()
    statistics = ActivationStatistics(prune.select(model))
    catch = contextlib.suppress(error)
    with contextlib.nullcontext() if is_caught_inside else catch, statistics.collecting():
        model(integers(2, 3))
        with catch if is_caught_inside else contextlib.nullcontext():
            model.error = error()
            model(integers(2, 3))
        model.error = None
        model(integers(2, 3))
    model.error = None
    assert not torch.nn.modules.module._global_forward_hooks
    for call in (statistics.wanda, lambda: statistics.save(tmp_path / "a")):
        with pytest.raises(RuntimeError, match=r"a forward raised.*expected new statistics"):
            call()
    new = collect(model, integers(2, 3))
    assert new.num_tokens() == {"first.weight": 2, "second.weight": 2}


# Fused experts: the sums of each expert are those of the tokens that came to it.


FUSED = ("gate_up_proj", "down_proj")


def collect_of_experts(net, batches, parameters=None):
    statistics = ActivationStatistics(parameters or prune.select(net, names=FUSED))
    return collected(statistics, net, *batches)


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
    statistics = collect_of_experts(experts_net(implementation, dtype), parts)
    reference = expected(experts_net(dtype=dtype), parts)
    assert_equal(statistics.totals(), reference)
    assert statistics.num_tokens() == {name: found[0] for name, found in reference.items()}
    assert reference["second.down_proj"][0][-1] == 0 < min(reference["first.down_proj"][0])


def test_files_keep_the_tokens_of_each_expert(tmp_path):
    parts = [tokens_of(part) for part in range(3)]
    statistics = collect_of_experts(experts_net(), parts)
    statistics.save(tmp_path / "a.safetensors")
    net = experts_net()
    loaded = ActivationStatistics.load(tmp_path / "a.safetensors", prune.select(net, names=FUSED))
    assert_equal(loaded.totals(), expected(net, parts))
    collected(loaded, net, tokens_of(3))
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
    statistics = collect_of_experts(net, [torch.zeros(0, 8)])
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
