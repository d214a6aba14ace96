"""Wanda, RIA, STADE and OWL's outlier ratios against loops written from the papers."""

import math
import statistics as of_numbers

import pytest
import torch
from torch import Tensor, nn

import distprune as prune
from distprune.statistics import ActivationStatistics, GramMatrices
from helpers.collecting import collected, unfolded

LAYERS = ["linear", "conv1d of transformers", "conv2d", "grouped conv2d", "depthwise conv1d"]


def layer_and_input(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    match kind:
        case "linear":
            return nn.Linear(5, 4), torch.randn(2, 7, 5) + 1
        case "conv1d of transformers":
            layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 5)
            nn.init.normal_(layer.weight)
            return layer, torch.randn(2, 7, 5) + 1
        case "conv2d":
            return nn.Conv2d(2, 3, (2, 3), padding=1), torch.randn(2, 2, 4, 5) + 1
        case "grouped conv2d":
            return nn.Conv2d(4, 6, 2, groups=2), torch.randn(2, 4, 4, 5) + 1
        case _:
            return nn.Conv1d(4, 8, 3, groups=4, padding=1), torch.randn(2, 4, 6) + 1


def as_matrices(layer: nn.Module, x: Tensor) -> list[tuple[list[list[float]], list[list[float]]]]:
    """A matrix [outputs][inputs] per group, and the inputs [tokens][inputs] that it multiplies."""
    weight = layer.weight.detach().double()
    if isinstance(layer, nn.Linear):
        return [(weight.tolist(), x.double().flatten(0, -2).tolist())]
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        return [(weight.T.tolist(), x.double().flatten(0, -2).tolist())]
    groups = unfolded(layer, x.double()).chunk(layer.groups, 1)
    return [
        (w.flatten(1).tolist(), group.tolist())
        for w, group in zip(weight.chunk(layer.groups), groups, strict=True)
    ]


def whole(layer: nn.Module, matrices: list[list[list[float]]]) -> Tensor:
    """Scores of the matrices, in the shape of the weight."""
    scores = torch.cat([torch.tensor(matrix, dtype=torch.float64) for matrix in matrices])
    if not isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
        scores = scores.T
    return scores.reshape(layer.weight.shape)


def multiplied(weight: Tensor, factored: prune.FactoredScores) -> Tensor:
    total = torch.zeros(weight.shape)
    for term in factored.terms:
        product = torch.ones(weight.shape)
        for factor in term:
            assert factor.dtype is torch.float32 and factor.ndim == weight.ndim
            product = product * factor
        total = total + product
    return weight.detach().abs() * total


def of_layer(layer: nn.Module, x: Tensor) -> ActivationStatistics:
    """Of unbatched inputs for a convolution, and [tokens, features] for others."""
    statistics = ActivationStatistics([prune.NamedParameter(layer, "weight", "layer.weight")])
    return collected(statistics, layer, *x)


def rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def sum_of(values: list[float]) -> float:
    return sum(map(abs, values)) or 1


def by_loops(layer: nn.Module, x: Tensor, score) -> Tensor:
    """A score of each weight, of its row and its column, and of what it is multiplied by."""
    matrices = []
    for matrix, tokens in as_matrices(layer, x):
        columns, inputs = (list(zip(*rows, strict=True)) for rows in (matrix, tokens))
        matrices.append([
            [score(abs(w), row, columns[j], inputs[j]) for j, w in enumerate(row)] for row in matrix
        ])  # fmt: skip
    return whole(layer, matrices)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("method", "of_inputs"), [("wanda", rms), ("stade", of_numbers.pstdev)])
def test_wanda_and_stade(kind, method, of_inputs):
    layer, x = layer_and_input(kind)
    expected = by_loops(layer, x, lambda w, row, column, inputs: w * of_inputs(inputs))
    (scores,) = getattr(of_layer(layer, x), method)().values()
    assert_close(multiplied(layer.weight, scores), expected)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("is_pruned", [False, True])
def test_ria(kind, power, is_pruned):
    layer, x = layer_and_input(kind)
    statistics = of_layer(layer, x)
    if is_pruned:
        prune.l1_unstructured(layer, "weight", 0.4)
        with torch.no_grad():
            layer.weight_orig[layer.weight_mask == 0] = 100.0  # what is pruned has no say
        layer(x[0])

    def ria(w, row, column, inputs):
        return (w / sum_of(column) + w / sum_of(row)) * rms(inputs) ** power

    (scores,) = statistics.ria(power=power).values()
    assert_close(multiplied(layer.weight, scores), by_loops(layer, x, ria))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-12)
    assert expected.unique().numel() > 2


def test_a_row_and_a_column_of_zeros_score_zero():
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 0, 0], [0, 1, 2], [0, 3, 4]]))
    (scores,) = of_layer(layer, torch.ones(1, 2, 3)).ria().values()
    found = multiplied(layer.weight, scores)
    assert found[0].tolist() == [0.0] * 3 and found[:, 0].tolist() == [0.0] * 3
    assert (found[1:, 1:] > 0).all()


def test_a_constant_input_has_no_deviation():
    layer = nn.Linear(1, 1)
    (scores,) = of_layer(layer, torch.full((3, 5, 1), 0.1)).stade().values()
    assert multiplied(layer.weight, scores).item() < 1e-8


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 6, bias=False))
            for _ in range(2)
        )
        self.head = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("per", ["block", "parameter"])
@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize("multiple", [0.5, 2.0, 5.0])
def test_outlier_ratios(per, is_pruned, multiple):
    torch.manual_seed(4)
    model, x = Blocks(), torch.randn(20, 6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.pow_(5)  # heavy tails
    if is_pruned:
        prune.global_unstructured(
            prune.select(model, everything=True), prune.L1Unstructured, amount=0.3
        )
    statistics = collected(ActivationStatistics(prune.select(model, everything=True)), model, x)
    groups: dict[str, list[float]] = {}
    names = {}
    for pair, factored in statistics.wanda().items():
        module, name = pair
        scores = multiplied(getattr(module, name), factored).flatten().tolist()
        if is_pruned:
            live = (module.weight_mask != 0).flatten().tolist()
            scores = [score for score, is_live in zip(scores, live, strict=True) if is_live]
        block = ".".join(pair.fqn.split(".")[:2]) if per == "block" else pair.fqn
        if pair.fqn == "head.weight":
            block = pair.fqn
        groups.setdefault(block, []).extend(scores)
        names[pair] = block
    ratios = statistics.outlier_ratios(threshold_multiple=multiple, per=per)
    assert list(ratios) == list(names)
    for pair, block in names.items():
        scores = groups[block]
        mean = math.fsum(scores) / len(scores)
        assert ratios[pair] == sum(score > multiple * mean for score in scores) / len(scores)
    assert len(set(ratios.values())) > 1


def test_outlier_ratios_of_equal_scores_and_of_a_wrong_argument():
    layer = nn.Linear(3, 2, bias=False)
    nn.init.constant_(layer.weight, 0.1)
    statistics = of_layer(layer, torch.ones(1, 4, 3))
    assert list(statistics.outlier_ratios(threshold_multiple=1.0).values()) == [0.0]
    assert list(statistics.outlier_ratios(threshold_multiple=0.999).values()) == [1.0]
    with pytest.raises(ValueError, match="per='layer'"):
        statistics.outlier_ratios(per="layer")


@pytest.mark.parametrize("score", ["wanda", "stade", "ria", "obs"])
def test_an_expert_without_tokens_is_ranked_by_magnitude(score):
    """Times what the experts beside it score for it, in the mean of squares over their inputs."""
    model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(3, 4) for _ in range(4))})
    model["other"] = nn.Linear(3, 3)  # of another kind, with larger inputs
    grams = GramMatrices(prune.select(model, everything=True, names="weight"), allow_empty="*")
    with torch.no_grad(), grams.collecting():
        for number, scale in ((0, 1.0), (2, 3.0)):
            model["experts"][number](scale * torch.tensor([[1.0, 2, 2], [-1, -2, -2]]))
        model["other"](torch.full((2, 3), 100.0))
    message = r"no token came to experts\.1\.weight, experts\.3\.weight \(2 of 5 matrices"
    with pytest.warns(UserWarning, match=message):
        scores = getattr(grams, score)()
    norm = torch.tensor((3 + 27) / 2).sqrt()  # squares of the inputs: 1, 4, 4 and 9, 36, 36
    for number in (1, 3):
        weight = model["experts"][number].weight.detach()
        factor = norm
        if score == "ria":
            magnitudes = weight.abs()
            factor = norm.sqrt() * (1 / magnitudes.sum(0) + 1 / magnitudes.sum(1, keepdim=True))
        found = multiplied(weight, scores[model["experts"][number], "weight"])
        torch.testing.assert_close(found, weight.abs() * factor)
