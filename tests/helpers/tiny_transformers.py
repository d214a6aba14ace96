"""Tiny models of transformers' own classes, one of each family, with random weights."""

import json
from pathlib import Path

import torch

# By name: the class, and the arguments of its config. Those of parts are mappings.
FAMILIES = json.loads(Path(__file__).with_suffix(".json").read_text())


def tiny_model(family):
    """Make a model of a family; every call gives the same values."""
    import transformers

    name, arguments = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**arguments))
    for parameter in model.parameters():  # norms and biases begin with ones and zeros
        torch.nn.init.normal_(parameter)
    return model.eval()


def save_tiny(family, folder, **options):
    """Write a checkpoint of a tiny model with transformers."""
    tiny_model(family).save_pretrained(folder, **options)
    return folder
