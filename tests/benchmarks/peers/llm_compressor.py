"""Prune a language model with llm-compressor. It runs in an environment that has llmcompressor.

python llm_compressor.py MODEL OUT --modifier SparseGPTModifier --sparsity 0.5 --windows FILE...
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers import pruning
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("output")
    parser.add_argument("--modifier", required=True)
    parser.add_argument("--sparsity", type=float, required=True)
    parser.add_argument("--mask-structure", default="0:0")
    parser.add_argument("--windows", nargs="+", required=True, help="of `distprune write-text`")
    settings = parser.parse_args()

    windows = torch.cat([load_file(file)["tokens"] for file in settings.windows]).tolist()
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    modifier = getattr(pruning, settings.modifier)(
        sparsity=settings.sparsity,
        mask_structure=settings.mask_structure,
        targets=["Linear"],
        ignore=["re:.*lm_head"],
    )
    oneshot(
        model=model,
        dataset=Dataset.from_dict(
            {"input_ids": windows, "attention_mask": [[1] * len(w) for w in windows]}
        ),
        recipe=[modifier],
        num_calibration_samples=len(windows),
        max_seq_length=len(windows[0]),
        shuffle_calibration_samples=False,
        batch_size=1,
    )
    model.save_pretrained(settings.output, save_compressed=False)


if __name__ == "__main__":
    main()
