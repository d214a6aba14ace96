"""What pruning Llamas of 1B, 8B and 70B by text takes, from headers alone; nothing is measured.

    python tests/benchmarks/plan_by_text.py [--save NAME]

Memory, disk and reads are those of ``streaming.estimate`` for bf16 checkpoints whose files have
headers and no data; 32 windows of 2,048 tokens, one in a batch. Operations are counted: 2 per
weight and token for a forward, three forwards' worth for a forward with its backward, tokens x
inputs^2 x 2 for a Gram matrix, and 17 products of 2 x elements x inputs, in float64, for least
squares. Seconds follow from rates below. Weights are read once where they fit, a part on each
device, beside what a pass needs, and else in each pass; all of the disk that is needed for a while
counts as written once and read three times, as hidden states are. Sending is not counted: three
all-gathers of the weights take seconds.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from distprune import streaming
from distprune.files.checkpoints.header import make_header
from distprune.files.recipe import FileRecipe

RESULTS = Path(__file__).parent / "results"
WINDOWS, LENGTH = 32, 2048
# By name: width, hidden width, layers, key and value heads of 128 (of 64 in the first), tied.
MODELS = {
    "Llama-3.2-1B": (2048, 8192, 16, 512, True),
    "Llama-3-8B": (4096, 14336, 32, 1024, False),
    "Llama-3-70B": (8192, 28672, 80, 1024, False),
}
# Devices; operations per second of each in bf16 (or what it computes in) and float64; bytes per
# second of the disk; bytes of memory where weights stay in it.
MACHINES = {
    "laptop, 4 cores of 30 GFLOP/s": (1, 0.12e12, 0.06e12, 1e9, 0),
    "16 cores of 50 GFLOP/s": (1, 0.8e12, 0.4e12, 1e9, 0),
    "H100, a third of its peak": (1, 330e12, 20e12, 2e9, 80e9),
    "8 of them": (8, 330e12, 20e12, 2e9, 80e9),
}


def write(
    folder: Path,
    width: int,
    hidden: int,
    layers: int,
    kv: int,
    tied: bool,
    vocabulary: int = 128256,
) -> None:
    """A folder with a config, and files of holes."""
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, width)
    for number in range(layers):
        prefix = f"model.layers.{number}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (width, width),
            f"{prefix}self_attn.k_proj.weight": (kv, width),
            f"{prefix}self_attn.v_proj.weight": (kv, width),
            f"{prefix}self_attn.o_proj.weight": (width, width),
            f"{prefix}mlp.gate_proj.weight": (hidden, width),
            f"{prefix}mlp.up_proj.weight": (hidden, width),
            f"{prefix}mlp.down_proj.weight": (width, hidden),
            f"{prefix}input_layernorm.weight": (width,),
            f"{prefix}post_attention_layernorm.weight": (width,),
        }
    sizes = {name: 2 * shape[0] * (shape[1] if shape[1:] else 1) for name, shape in shapes.items()}
    described = {name: ("BF16", shape, sizes[name]) for name, shape in shapes.items()}
    header, _ = make_header(described, {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(sizes.values()))
    heads = width // 128 if width > 2048 else 32
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": 8192,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def operations(width: int, hidden: int, layers: int, kv: int) -> tuple[float, float]:
    """(in bf16, in float64)."""
    matrices = [(width, width), (kv, width), (kv, width), (width, width)]
    matrices += [(hidden, width), (hidden, width), (width, hidden)]
    tokens = WINDOWS * LENGTH
    numel = sum(rows * columns for rows, columns in matrices)
    grams = 2 * tokens * (3 * width**2 + hidden**2)  # q, k, v share one; gate and up share one
    plain = layers * (2 * numel * tokens * (1 + 3 + 1) + grams)
    solved = layers * sum(17 * 2 * rows * columns * columns for rows, columns in matrices)
    return plain, solved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    arguments = parser.parse_args()
    recipe = FileRecipe(sparsity=0.6, score="fisher", normalize=None)
    head = ["model", "memory", "disk", "reads", *MACHINES]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, (width, hidden, layers, kv, tied) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), width, hidden, layers, kv, tied)
            cost = streaming.estimate(folder, recipe, WINDOWS, LENGTH)
        plain, solved = operations(width, hidden, layers, kv)
        times = []
        for number, bf16, fp64, disk, memory in MACHINES.values():
            stays = cost.peak + cost.weights / number <= memory
            num_bytes = (cost.weights if stays else cost.reads) + 4 * cost.disk
            minutes = ((plain / bf16 + solved / fp64) / number + num_bytes / disk) / 60
            text = f"{minutes / 60:.1f} h" if minutes > 99 else f"{minutes:.0f} min"
            times.append(text + (" (resident)" if stays else ""))
        sizes = [f"{size / 1e9:.1f} GB" for size in (cost.peak, cost.disk, cost.reads)]
        rows.append([name, *sizes, *times])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    command = " ".join(["python tests/benchmarks/plan_by_text.py", *sys.argv[1:]])
    text = f"{text}\n\nComputed, not measured; 32 windows of 2,048 tokens:\n\n    {command}\n"
    print(text)
    if arguments.save:
        (RESULTS / f"{arguments.save}.txt").write_text(text)


if __name__ == "__main__":
    main()
