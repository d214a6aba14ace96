"""Causal language models of transformers: each runs layer by layer, or `plan` refuses it."""

import json
import zlib
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distprune import language_models, streaming
from distprune.files.errors import SelectionError
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.streaming import tokens

RECIPE = raw_recipe(sparsity=0.5, score="fisher", normalize=None)
# Data about the classes. "small": arguments of configurations, of which each takes what it has;
# "more": those of one class. "odd": classes whose layers return tuples, share a state, or multiply
# it; whose tensors have other names than the parameters that they become, or become several; and
# whose layers run in a loop. "unmade": what has no small form here, as it takes audio, images or
# states, or needs sizes of its own. "refused": classes with no chain of layers, layers in an
# encoder, or experts of which no inputs are known.
DATA = json.loads(Path(__file__).with_name("causal_language_models.json").read_text())
ALL = {n for n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(n, str)}
# In an order that has nothing to do with families, of which several begin alike.
NAMES = sorted(ALL - {*DATA["odd"], *DATA["unmade"]}, key=lambda name: zlib.crc32(name.encode()))


def small_sizes(config):
    """What "small" says of the arguments of a class, and of the configurations in it."""
    large = config()
    known = {*vars(large), *getattr(config, "attribute_map", {})}
    sizes = {key: value for key, value in DATA["small"].items() if key in known}
    parts = {name: getattr(large, name, None) for name in getattr(config, "sub_configs", {})}
    return sizes | {n: small_sizes(type(p)) for n, p in parts.items() if hasattr(p, "to_dict")}


def small_model(name):
    """A model of a class."""
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class
    sizes = {} if name == "DbrxForCausalLM" else small_sizes(config)
    sizes |= DATA["more"].get(name, {})
    with torch.device("meta"):
        assert sum(p.numel() for p in cls(config(**sizes)).parameters()) < 1e6
    torch.manual_seed(0)
    return cls(config(**sizes)).eval()


@pytest.mark.parametrize("name", [*DATA["odd"], *every(8, NAMES)])
def test_families(tmp_path, name):
    """It runs, with the whole model's perplexity, or is refused, by ``plan`` in the same words."""
    source, text = tmp_path / "source", tokens(2, seed=1)
    small_model(name).save_pretrained(source)
    if name in DATA["refused"]:
        with pytest.raises((NotImplementedError, ValueError, SelectionError)) as planned:
            streaming.estimate(source, RECIPE, len(text), text.length)
        with pytest.raises(planned.type) as refused:
            streaming.prune_folder(source, tmp_path / "out", RECIPE, text, evaluation=text)
        assert str(planned.value) == str(refused.value)
        assert not list(tmp_path.glob("out*"))
        return
    made = streaming.prune_folder(source, tmp_path / "out", RECIPE, text, evaluation=text)
    whole = language_models.perplexity(language_models.load_sharded(source), text)
    assert made.before == pytest.approx(whole.perplexity, rel=1e-6)
