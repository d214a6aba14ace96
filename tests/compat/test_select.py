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


class TestPlainModels:
    def test_matrices_inside_the_model_in_order_of_registration(self):
        assert names(prune.select(Net())) == DEFAULT

    def test_everything_is_every_weight_but_those_of_norms(self):
        assert names(prune.select(Net(), everything=True)) == EVERYTHING
        vectors = nn.Sequential(nn.PReLU(3), nn.Linear(3, 1), nn.LayerNorm(3))
        assert names(prune.select(vectors, everything=True)) == ["0.weight", "1.weight"]
        with pytest.raises(ValueError, match=r"left out \(fewer than 2"):
            prune.select(vectors[:1])

    def test_types_tell_more_than_names(self):
        tokens, layer, norm = nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm((2, 3))
        model = nn.Sequential(tokens, layer, norm, nn.EmbeddingBag(5, 6), nn.Linear(6, 5))
        assert names(prune.select(model)) == ["1.weight", "4.weight"]
        model.get_output_embeddings = lambda: model[4]
        assert names(prune.select(model)) == ["1.weight"]
        model[4] = nn.Linear(4, 5)
        model[4].weight = tokens.weight
        assert names(prune.select(model)) == ["1.weight"]

    def test_integers_and_single_channels_are_left_alone(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Conv1d(4, 4, 3, groups=4))
        model[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
        assert names(prune.select(model)) == ["1.weight"]

    def test_pairs_are_those_of_torch(self):
        model = Net()
        pair = prune.select(model)[0]
        module, name = pair
        assert module is model.blocks[0].up and name == "weight"
        assert pair == (model.blocks[0].up, "weight")
        assert {pair: 1}[(module, "weight")] == 1

    def test_a_lone_module_has_no_prefix(self):
        assert names(prune.select(nn.Linear(2, 2))) == ["weight"]

    def test_other_names(self):
        biases = {"types": nn.Linear, "names": ("weight", "bias")}
        with pytest.raises(ValueError, match=r"called 'bias' .* left out \(fewer than 2"):
            prune.select(Net(), **biases)
        expected = [f"blocks.{i}.up.{name}" for i in range(2) for name in ("weight", "bias")]
        for asked in ({"include": "*", "min_ndim": 1}, {"everything": True}):
            selected = prune.select(Net(), **biases, **asked)
            assert names(selected) == [*expected, "head.weight"]

    def test_types(self):
        convolutions = [DEFAULT[1], DEFAULT[3]]
        assert names(prune.select(Net(), types=nn.Conv1d)) == convolutions
        types = (nn.Conv1d, nn.Embedding)
        assert names(prune.select(Net(), types=types)) == convolutions
        selected = prune.select(Net(), types=types, everything=True)
        assert names(selected) == ["embed.weight", *convolutions]
        assert names(prune.select(Net(), "*", types=types)) == ["embed.weight", *convolutions]

    def test_also_adds_to_the_default(self):
        assert names(prune.select(Net(), also="head")) == [*DEFAULT, "head.weight"]
        with pytest.raises(ValueError, match=r"beside include=\['embed'\]"):
            prune.select(Net(), "embed", also="head")
        with pytest.raises(ValueError, match="everything=True"):
            prune.select(Net(), also="head", everything=True)

    def test_norms_only_when_asked_for(self):
        asked = ["blocks.0.norm.weight", "blocks.1.norm.weight"]
        assert names(prune.select(Net(), types=nn.LayerNorm, everything=True)) == asked
        assert names(prune.select(Net(), include="*.norm", everything=True)) == asked
        assert names(prune.select(Net(), "*.norm.weight", min_ndim=1)) == asked

    def test_pruned_parameters_are_listed_like_any_other(self):
        model = Net()
        before = prune.select(model)
        prune.global_unstructured(before, prune.L1Unstructured, amount=0.5)
        assert prune.select(model) == before

    def test_tied_parameters_are_listed_where_they_come_first(self):
        model = Net()
        model.head.weight = model.embed.weight
        assert names(prune.select(model, everything=True)) == EVERYTHING[:-1]
        linear = prune.select(model, types=nn.Linear, exclude="head", everything=True)
        assert names(linear) == [DEFAULT[0], DEFAULT[2]]
        assert names(prune.select(model)) == DEFAULT

    def test_a_module_in_two_places_is_listed_once(self):
        layer = nn.Linear(2, 2)
        assert names(prune.select(nn.Sequential(layer, nn.ReLU(), layer))) == ["0.weight"]


class TestPatterns:
    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("head", ["head.weight"]),
            ("head.weight", ["head.weight"]),
            ("blocks.1.*", [DEFAULT[2], DEFAULT[3]]),
            ("blocks.?.up", [DEFAULT[0], DEFAULT[2]]),
            ("blocks.[0-9].conv", [DEFAULT[1], DEFAULT[3]]),
            ("*.up.weight", [DEFAULT[0], DEFAULT[2]]),
            (r"re:blocks\.\d+\.(up|conv)", DEFAULT),
            (r"re:.*\.up\.weight", [DEFAULT[0], DEFAULT[2]]),
            (["head", "embed"], ["embed.weight", "head.weight"]),
        ],
    )
    def test_include(self, pattern, expected):
        assert names(prune.select(Net(), include=pattern)) == expected

    @pytest.mark.parametrize(
        ("pattern", "left_out"),
        [
            ("head", ["head.weight"]),
            (["head", "embed.weight"], ["head.weight", "embed.weight"]),
            ("blocks.0*", [DEFAULT[0], DEFAULT[1]]),
            (r"re:.*conv", [DEFAULT[1], DEFAULT[3]]),
        ],
    )
    def test_exclude(self, pattern, left_out):
        for everything, selected in ((False, DEFAULT), (True, EVERYTHING)):
            expected = [name for name in selected if name not in left_out]
            found = prune.select(Net(), exclude=pattern, everything=everything)
            assert names(found) == expected

    def test_exclude_wins(self):
        selected = prune.select(Net(), include="blocks.*.up", exclude="blocks.0.up")
        assert names(selected) == [DEFAULT[2]]

    def test_every_pattern_has_to_match(self):
        with pytest.raises(ValueError, match=r"'lm_head' matches no parameter.*embed\.weight"):
            prune.select(Net(), exclude=["head", "lm_head"])

    def test_nothing_left(self):
        with pytest.raises(ValueError, match="nothing is selected"):
            prune.select(Net(), exclude="*")
        with pytest.raises(ValueError, match="nothing is selected"):
            prune.select(Net(), types=nn.Conv3d)
        with pytest.raises(ValueError, match="nothing is selected"):
            prune.select(nn.ReLU())

    @pytest.mark.parametrize("argument", ["include", "exclude", "names"])
    def test_patterns_are_strings(self, argument):
        with pytest.raises(TypeError, match=argument):
            prune.select(Net(), **{argument: [3]})


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
