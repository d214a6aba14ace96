"""Causal language models of transformers, small, with random weights: by the name of the class."""

import json
from pathlib import Path

import torch

# Data about the classes. "small": arguments of configurations, of which each takes what it has;
# "more": those of one class. "odd": classes whose layers return tuples, share a state, or multiply
# it; whose tensors have other names than the parameters that they become, or become several; and
# whose layers run in a loop. "unmade": what has no small form here, as it takes audio, images or
# states, or needs sizes of its own. "refused": classes with no chain of layers, layers in an
# encoder, or experts of which no inputs are known.
DATA = json.loads(Path(__file__).with_name("causal_language_models.json").read_text())


def small_sizes(config):
    """What "small" says of the arguments of a class, and of the configurations in it."""
    large = config()
    known = {*vars(large), *getattr(config, "attribute_map", {})}
    sizes = {key: value for key, value in DATA["small"].items() if key in known}
    parts = {name: getattr(large, name, None) for name in getattr(config, "sub_configs", {})}
    return sizes | {n: small_sizes(type(p)) for n, p in parts.items() if hasattr(p, "to_dict")}


def small_model(name, **changes):
    """A model of a class; changes are of its configuration."""
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class
    sizes = {} if name == "DbrxForCausalLM" else small_sizes(config)
    sizes |= DATA["more"].get(name, {}) | changes
    with torch.device("meta"):
        assert sum(p.numel() for p in cls(config(**sizes)).parameters()) < 1e6
    torch.manual_seed(0)
    return cls(config(**sizes)).eval()
