"""What ActivationStatistics adds up on one process, against sums over an unfolded input."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import distprune as prune
from distprune.statistics import ActivationStatistics

SEED = 7


def collect(model: nn.Module, *batches: Tensor, **options) -> ActivationStatistics:
    statistics = ActivationStatistics(prune.select(model, everything=True), **options)
    with statistics.collecting():
        for batch in batches:
            model(batch)
    return statistics


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


def unfolded(layer: nn.Module, x: Tensor) -> Tensor:
    """The input of a convolution as a matrix: a row per position of the output."""
    # torch's own field, which its forward uses for other modes than zeros and for "same".
    around = [0 if layer.padding == "valid" else n for n in layer._reversed_padding_repeated_twice]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = functional.pad(x, around, mode=mode)
    extra = (1,) * (4 - x.ndim)
    kernel, dilation, stride = (
        (*sizes, *extra) for sizes in (layer.kernel_size, layer.dilation, layer.stride)
    )
    columns = functional.unfold(x.view(*x.shape, *extra), kernel, dilation=dilation, stride=stride)
    return columns.transpose(1, 2).reshape(-1, columns.shape[1])


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
    with statistics.collecting():
        model[0](torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"1\.weight: the layer was not called"):
        statistics.totals()
    assert statistics.num_tokens([(model[0], "weight")]) == {"0.weight": 2}
    with statistics.collecting():
        model[1](torch.ones(1, 3))
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
    statistics = ActivationStatistics(prune.select(compiled))
    with statistics.collecting():
        compiled(x)
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


def test_copies_that_are_made_meanwhile_have_no_hook():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        model(torch.ones(2, 3))
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model[0])]
        copies[0](torch.ones(5, 3))
        copies[2](torch.ones(5, 3))
    for each in copies:
        assert not any(layer._forward_pre_hooks for layer in each.modules())
        assert not any(layer._forward_hooks for layer in each.modules())
        each(torch.ones(2, 3)).sum().backward()
    assert statistics.num_tokens() == {"0.weight": 2, "2.weight": 2}
