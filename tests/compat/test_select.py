"""select: the same names and order on plain models, wrapped models and models of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import distprune as prune


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.conv = nn.Conv1d(8, 4, 1)
        self.batch_norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.conv(self.up(self.norm(x)).unsqueeze(-1)).squeeze(-1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


DEFAULT = [f"blocks.{i}.{part}.weight" for i in range(2) for part in ("up", "conv")]
EVERYTHING = ["embed.weight", *DEFAULT, "head.weight"]


def names(selected) -> list[str]:
    return [pair.fqn for pair in selected]


CONVOLUTIONS, NORMS = [DEFAULT[1], DEFAULT[3]], ["blocks.0.norm.weight", "blocks.1.norm.weight"]
BIASES = {"types": nn.Linear, "names": ("weight", "bias")}
WITH_BIASES = [f"blocks.{i}.up.{name}" for i in range(2) for name in ("weight", "bias")]
ROWS = [
    ({}, DEFAULT),
    ({"everything": True}, EVERYTHING),
    ({"also": "head"}, [*DEFAULT, "head.weight"]),
    ({"types": nn.Conv1d}, CONVOLUTIONS),
    ({"types": (nn.Conv1d, nn.Embedding)}, CONVOLUTIONS),
    ({"types": (nn.Conv1d, nn.Embedding), "everything": True}, ["embed.weight", *CONVOLUTIONS]),
    ({"types": (nn.Conv1d, nn.Embedding), "include": "*"}, ["embed.weight", *CONVOLUTIONS]),
    ({**BIASES, "everything": True}, [*WITH_BIASES, "head.weight"]),
    ({**BIASES, "include": "*", "min_ndim": 1}, [*WITH_BIASES, "head.weight"]),
    ({"types": nn.LayerNorm, "everything": True}, NORMS),
    ({"include": "*.norm", "everything": True}, NORMS),
    ({"include": "*.norm.weight", "min_ndim": 1}, NORMS),
    ({"include": "head"}, ["head.weight"]),
    ({"include": "head.weight"}, ["head.weight"]),
    ({"include": "blocks.1.*"}, DEFAULT[2:]),
    ({"include": "blocks.?.up"}, DEFAULT[::2]),
    ({"include": "blocks.[0-9].conv"}, CONVOLUTIONS),
    ({"include": r"re:blocks\.\d+\.(up|conv)"}, DEFAULT),
    ({"include": ["head", "embed"]}, ["embed.weight", "head.weight"]),
    ({"include": "blocks.*.up", "exclude": "blocks.0.up"}, [DEFAULT[2]]),
    ({"exclude": "head"}, DEFAULT),
    ({"exclude": ["head", "embed.weight"], "everything": True}, DEFAULT),
    ({"exclude": "blocks.0*"}, DEFAULT[2:]),
    ({"exclude": "re:.*conv"}, DEFAULT[::2]),
]


@pytest.mark.parametrize(("arguments", "expected"), ROWS, ids=str)
def test_what_is_selected(arguments, expected):
    assert names(prune.select(Net(), **arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (BIASES, ValueError, r"called 'bias' .* left out \(fewer than 2"),
        ({"include": "embed", "also": "head"}, ValueError, r"beside include=\['embed'\]"),
        ({"also": "head", "everything": True}, ValueError, "everything=True"),
        ({"exclude": ["head", "lm_head"]}, ValueError,
         r"'lm_head' matches no parameter.*embed\.weight"),
        ({"exclude": "*"}, ValueError, "nothing is selected"),
        ({"types": nn.Conv3d}, ValueError, "nothing is selected"),
        *(({name: [3]}, TypeError, name) for name in ("include", "exclude", "names")),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        prune.select(Net(), **arguments)


def test_vectors():
    vectors = nn.Sequential(nn.PReLU(3), nn.Linear(3, 1), nn.LayerNorm(3))
    assert names(prune.select(vectors, everything=True)) == ["0.weight", "1.weight"]
    with pytest.raises(ValueError, match=r"left out \(fewer than 2"):
        prune.select(vectors[:1])


def test_types_tell_more_than_names():
    tokens, layer, norm = nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm((2, 3))
    model = nn.Sequential(tokens, layer, norm, nn.EmbeddingBag(5, 6), nn.Linear(6, 5))
    assert names(prune.select(model)) == ["1.weight", "4.weight"]
    model.get_output_embeddings = lambda: model[4]
    assert names(prune.select(model)) == ["1.weight"]
    model[4] = nn.Linear(4, 5)
    model[4].weight = tokens.weight
    assert names(prune.select(model)) == ["1.weight"]


def test_integers_and_single_channels_are_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Conv1d(4, 4, 3, groups=4))
    model[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    assert names(prune.select(model)) == ["1.weight"]


def test_pairs_are_those_of_torch_pruned_or_not():
    model = Net()
    before = prune.select(model)
    module, name = before[0]
    assert module is model.blocks[0].up and name == "weight"
    assert before[0] == (module, "weight") and {before[0]: 1}[(module, "weight")] == 1
    prune.global_unstructured(before, prune.L1Unstructured, amount=0.5)
    assert prune.select(model) == before


def test_what_is_in_two_places_is_listed_where_it_comes_first():
    layer = nn.Linear(2, 2)
    assert names(prune.select(layer)) == ["weight"]
    assert names(prune.select(nn.Sequential(layer, nn.ReLU(), layer))) == ["0.weight"]
    model = Net()
    model.head.weight = model.embed.weight
    assert names(prune.select(model, everything=True)) == EVERYTHING[:-1]
    assert names(prune.select(model)) == DEFAULT
    linear = prune.select(model, types=nn.Linear, exclude="head", everything=True)
    assert names(linear) == DEFAULT[::2]


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def with_checkpointed_blocks(model: nn.Module) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


def with_compiled_blocks(model: nn.Module) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        AveragedModel,
        nn.DataParallel,
        checkpoint_wrapper,
        with_checkpointed_blocks,
        with_compiled_blocks,
        lambda model: compiled(with_checkpointed_blocks(model)),
        lambda model: AveragedModel(compiled(model)),
    ],
)
def test_wrappers_leave_no_trace_in_names(wrap):
    wrapped = wrap(Net())
    assert names(prune.select(wrapped)) == DEFAULT
    assert names(prune.select(wrapped, include="blocks.1.up")) == [DEFAULT[2]]
    prune.global_unstructured(prune.select(wrapped), prune.L1Unstructured, amount=0.5)
    assert names(prune.select(wrapped)) == DEFAULT


def test_submodules_called_like_those_of_wrappers_stay():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self._orig_mod = nn.Linear(2, 2)

    model = nn.Sequential(Holder(), Holder())
    expected = ["0.module.weight", "0._orig_mod.weight", "1.module.weight", "1._orig_mod.weight"]
    assert names(prune.select(model)) == expected
    assert names(prune.select(compiled(model))) == expected
    assert names(prune.select(model, include="*.module")) == [expected[0], expected[2]]
