"""Prune a small checkpoint from the command line, and write what the terminal shows.

python docs/session_of_commands.py

The build of the documentation runs it (hooks.py), for docs/checkpoints.md. The checkpoint has
random weights and the names of a Llama.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH = 106  # of a page
HIDDEN, INNER, VOCABULARY, NUM_LAYERS = 256, 1024, 4096, 8
COMMANDS = (
    "plan llama --sparsity 0.5",
    "prune llama llama-50 --sparsity 0.5",
    "verify llama-50 --against llama",
)


def write_checkpoint(folder: Path) -> None:
    """A bf16 checkpoint of one file, with its config."""
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    shapes["lm_head"] = (VOCABULARY, HIDDEN)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}self_attn.{name}"] = (HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}mlp.{name}"] = (INNER, HIDDEN)
        shapes[f"{prefix}mlp.down_proj"] = (HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}"] = (HIDDEN,)
    tensors = {
        f"{name}.weight": 0.02 * torch.randn(shape, dtype=torch.float32).bfloat16()
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))


def folded(line: str) -> list[str]:
    """A sentence in lines of the page's width; the row of a table as it is."""
    return [line] if "  " in line else textwrap.wrap(line, WIDTH) or [""]


def session() -> str:
    """The commands, and what they print."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder, "llama"))
        for command in COMMANDS:
            done = subprocess.run(
                [sys.executable, "-m", "distprune", *command.split()],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
            )
            printed = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
            shown = [part for line in printed for part in folded(line)]
            lines += [f"$ distprune {command}", *shown, ""]
    return "\n".join(lines)


def main() -> None:
    sys.stdout.write(session())


if __name__ == "__main__":
    main()
