"""Prune a language model with torch.nn.utils.prune: global magnitudes of its matrices.

python torch_prune.py MODEL OUT --sparsity 0.5
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("output")
    parser.add_argument("--sparsity", type=float, required=True)
    settings = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    parameters = [
        (module, "weight")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    prune.global_unstructured(parameters, prune.L1Unstructured, amount=settings.sparsity)
    for module, name in parameters:
        prune.remove(module, name)
    model.save_pretrained(settings.output)


if __name__ == "__main__":
    main()
