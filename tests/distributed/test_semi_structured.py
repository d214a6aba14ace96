"""Which pruned weights torch's semi-structured sparsity can compress, on any sharding."""

import pytest
import torch
from torch import nn
from torch.sparse import semi_structured as torch_semi_structured

import distprune as prune
from distprune.call.semi_structured import MULTIPLES
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import Net, fill, target

SIZES = (12, 24, 12, 5)
NAMES = ["l1.weight", "l2.weight", "l3.weight"]


def facts(report) -> list:
    return [(p.name, p.num_groups, p.num_fitting, p.fits_pattern) for p in report.parameters]


def differences(wrapping: str) -> list[str]:
    model = fill(Net(SIZES), "normal", "float32")
    scores = {name: model.get_parameter(name).detach().clone() for name in NAMES}
    model = wrappings.wrap(model, wrapping)
    pairs = [
        prune.NamedParameter(*target(wrappings.unwrapped(model), name), name) for name in NAMES
    ]
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.45)
    values = torch.cat([score.flatten().abs() for score in scores.values()])
    threshold = values.kthvalue(round(0.45 * len(values))).values
    wrong = []
    for pattern in ("2:4", "1:3", "3:4", "4:12"):
        n, m = map(int, pattern.split(":"))
        expected = [
            (name, score.numel() // m, fit := int(
                ((score.abs() > threshold).reshape(-1, m).sum(1) <= n).sum()
            ), fit == score.numel() // m)
            for name, score in scores.items()
        ]  # fmt: skip
        report = prune.is_semi_structured(model, pattern=pattern)
        if facts(report) != expected or report:
            wrong.append(f"{pattern}: {facts(report)}, not {expected}")
    prune.global_unstructured(pairs, prune.L1Unstructured, pattern="2:4")
    report = prune.is_semi_structured(model)
    if not all(parameter.fits_pattern for parameter in report.parameters):
        wrong.append(f"after 2:4: {report}")
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL + wrappings.FSDP2_DIM1))
def test_every_wrapper_counts_the_same_groups(wrapping):
    assert_nothing_wrong_on(wrapping, differences)


class Shapes(nn.Module):
    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.both = nn.Linear(64, 32, dtype=dtype)
        self.one = nn.Linear(16, 16, dtype=dtype)
        self.none = nn.Linear(12, 8, dtype=dtype)
        self.conv = nn.Conv2d(16, 16, 1, dtype=dtype)
        self.raw = nn.Linear(64, 32, dtype=dtype)


def test_layouts_and_the_line_of_the_report():
    model = Shapes()
    pairs = [
        prune.NamedParameter(module, "weight", f"{name}.weight")
        for name, module in model.named_children()
    ]
    report = prune.global_unstructured(
        pairs, prune.L1Unstructured, pattern="2:4", input_dims={"raw.weight": 0}
    )
    assert [name for name, _ in report.no_sparse_layout] == [
        "none.weight", "conv.weight", "raw.weight",
    ]  # fmt: skip
    assert "to_sparse_semi_structured takes 2 of 5 parameters. none.weight is 8 x 12" in str(report)
    found = prune.is_semi_structured(model, input_dims={"raw.weight": 0})
    assert not found
    assert [p.fits_pattern for p in found.parameters] == [True] * 5
    assert [p.fits for p in found.parameters] == [True, True, False, False, False]
    assert [p.backends for p in found.parameters][:3] == [
        ("cutlass", "cusparselt"), ("cusparselt",), (),
    ]  # fmt: skip
    assert "is stored [in, out]: convert its transpose" in str(found)
    report = prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.1)
    assert report.no_sparse_layout is None


def test_a_model_that_fits_is_true_and_one_without_masks_an_error():
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="nothing is pruned"):
        prune.is_semi_structured(model)
    prune.global_unstructured([(model[0], "weight")], prune.L1Unstructured, pattern="2:4")
    assert prune.is_semi_structured(model)
    assert not prune.is_semi_structured(model, pattern="1:4")
    with pytest.raises(ValueError, match="pattern='2x4'; expected how many of how many"):
        prune.is_semi_structured(model, pattern="2x4")


@pytest.mark.parametrize("backend", MULTIPLES)
def test_the_multiples_are_those_of_torch(backend):
    name = {"cutlass": "CUTLASS", "cusparselt": "CUSPARSELT"}[backend]
    theirs = getattr(
        torch_semi_structured, f"SparseSemiStructuredTensor{name}"
    )._DTYPE_SHAPE_CONSTRAINTS
    for dtype, multiples in MULTIPLES[backend].items():
        assert (theirs[dtype].sparse_min_rows, theirs[dtype].sparse_min_cols) == multiples
    assert set(theirs) - set(MULTIPLES[backend]) <= {torch.float8_e4m3fnuz}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_fits_converts(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(256, 128, bias=False, dtype=dtype, device="cuda")
    prune.global_unstructured([(linear, "weight")], prune.L1Unstructured, pattern="2:4")
    assert prune.is_semi_structured(linear)
    prune.remove(linear, "weight")
    sparse = torch.sparse.to_sparse_semi_structured(linear.weight.detach())
    assert torch.equal(sparse.to_dense(), linear.weight)
