"""Models of transformers, tiny, whose parameters have other names, or shapes, than their files.

Twelve experts of Mixtral: "10" comes before "2" in the order of letters. Of NomicBERT one tensor
becomes three, and of OLMo hybrid three become one. Experts of Qwen3-VL are transposed on loading if
they have another shape, under the same name.
"""

import json
from pathlib import Path

import torch
import transformers as hf
from torch import nn

SETTINGS = json.loads(Path(__file__).with_suffix(".json").read_text())
# By family: the classes of the model and of its config, and the arguments of the latter.
FAMILIES = {
    family: (getattr(hf, model), getattr(hf, config), settings)
    for family, (model, config, settings) in SETTINGS.items()
}


def make(family: str, **changes) -> nn.Module:
    """A model of a family without any zero among its weights."""
    cls, config, settings = FAMILIES[family]
    model = cls(config(**{**settings, **changes}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter[parameter == 0] = 1
    return model


def save(family: str, folder, **changes):
    """Write a checkpoint as transformers does."""
    make(family, **changes).save_pretrained(folder)
    return folder
