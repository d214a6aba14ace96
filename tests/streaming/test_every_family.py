"""Causal language models of transformers: each runs layer by layer, or `plan` refuses it."""

import zlib

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distprune import language_models, streaming
from distprune.files.errors import SelectionError
from helpers.causal_language_models import DATA, small_model
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.streaming import tokens

RECIPE = raw_recipe(sparsity=0.5, score="fisher", normalize=None)
ALL = {n for n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(n, str)}
# In an order that has nothing to do with families, of which several begin alike.
NAMES = sorted(ALL - {*DATA["odd"], *DATA["unmade"]}, key=lambda name: zlib.crc32(name.encode()))


@pytest.mark.parametrize("name", [*DATA["odd"], *every(16, NAMES)])
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
    options = {"evaluation": text, "update": "training"}
    made = streaming.prune_folder(source, tmp_path / "out", RECIPE, text, **options)
    whole = language_models.perplexity(language_models.load_sharded(source), text)
    assert made.before == pytest.approx(whole.perplexity, rel=1e-6)
