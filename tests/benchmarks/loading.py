"""Load a language model onto ranks from its files: memory and time, beside two other ways to read.

Each rank loads a Llama with random weights, and writes it again. Memory is the rank's own, as its
resident set grows; files that are mapped would count in it. The other ways fill the same shards,
once they exist: slices of safetensors' own mapped files, and torch.distributed.checkpoint with its
reader of Hugging Face folders. What was loaded is compared with the files before. A second table
has the memory of loading and pruning together.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loaded_pruning
import torch
import torch.distributed as dist
from gloo_ranks import on_gloo_ranks
from loaded_pruning import local
from measuring import Bound, CheckFailed, Measurement, Options, Table, Verdict, measured
from torch.distributed.tensor import DTensor

FACTOR = 1.3  # of shard + largest layer
NUM_RANKS = 2
WRAPS: tuple[Any, ...] = ("fsdp2", "tp")
# By dtype: layers of 12.8 million parameters, and embeddings of 65 million in all.
LAYERS = {"float32": 16, "bfloat16": 32}


def tables(options: Options) -> Iterator[Table]:
    table = Table(
        f"a Llama with random weights in files of 500 MB, on {NUM_RANKS} ranks: "
        "the largest of all ranks",
        ["", "model MB", "shard MB", "layer MB", "peak MB", "peak / (shard + layer)", "seconds",
         "saving: extra MB", "seconds", "get_slice: extra MB", "seconds", "DCP: extra MB",
         "seconds"],
        [],
        notes=[
            "peak: what loading adds to the resident set, the shard in it; extra: what comes on "
            "top of a model that is there."
        ],
    )  # fmt: skip
    pruned = loaded_pruning.empty_table(NUM_RANKS)
    for dtype, num_layers in LAYERS.items():
        if options.quick and dtype != "float32":
            continue
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as tiny:
            write_model(folder, dtype, num_layers, options.quick)
            write_model(tiny, dtype, 1, is_quick=True)
            found = on_gloo_ranks(load_on_ranks, NUM_RANKS, folder, tiny)
            for wrap in WRAPS:
                loaded_pruning.add_rows(pruned, folder, tiny, wrap, dtype, NUM_RANKS)
            for wrap, of_ranks in zip(WRAPS, zip(*found, strict=True), strict=True):
                row = [max(values) for values in zip(*of_ranks, strict=True)]
                table.rows.append([f"{wrap} {dtype}", *row])
                text = f"peak / (shard + largest layer) of loading, {wrap} {dtype}"
                table.verdicts.append(Verdict(Bound(text, FACTOR), row[4]))
    yield table
    yield pruned


def write_model(folder: str, dtype: str, num_layers: int, is_quick: bool) -> None:
    import transformers

    torch.manual_seed(0)
    width = 64 if is_quick else 1024
    config = transformers.LlamaConfig(
        vocab_size=500 if is_quick else 32000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=2 if is_quick else num_layers,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    state = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    model.save_pretrained(folder, state_dict=state, max_shard_size="500MB")


def load_on_ranks(folder: str, tiny: str) -> list[list[float]]:
    return [load_on_rank(folder, tiny, wrap) for wrap in WRAPS]


def load_on_rank(folder: str, tiny: str, wrap: Any) -> list[float]:
    """Figures of one rank, in the order of the columns.

    Args:
        folder: of the model.
        tiny: a model for a first round, so that imports and connections are no one's cost.
        wrap: of :func:`distprune.language_models.load_sharded`.
    """
    from distprune.language_models import load_sharded

    warm = load_sharded(tiny, wrap=wrap)
    slices_of_files(warm, tiny)
    distributed_checkpoint(warm, tiny)
    save_sharded_into(warm, tiny)
    del warm
    gc.freeze()
    kept: list[Any] = []
    loading = measured(lambda: kept.append(load_sharded(folder, wrap=wrap)))
    (model,) = kept
    check(model, folder)
    shard = sum(local(p).numel() * p.itemsize for p in model.parameters())
    layer = sum(p.numel() * p.itemsize for p in model.model.layers[0].parameters())
    whole = sum(p.numel() * p.itemsize for p in model.parameters())
    saving = measured(lambda: save_sharded_into(model, folder))
    slicing = measured(lambda: slices_of_files(model, folder))
    check(model, folder)
    reading = measured(lambda: distributed_checkpoint(model, folder))
    check(model, folder)
    ratio = loading.peak_extra_bytes / (shard + layer)
    sizes = [size / 1e6 for size in (whole, shard, layer, loading.peak_extra_bytes)]
    return [*sizes, ratio, loading.seconds, *figures(saving), *figures(slicing), *figures(reading)]


def figures(measurement: Measurement) -> list[float]:
    return [measurement.peak_extra_bytes / 1e6, measurement.seconds]


def save_sharded_into(model: Any, folder: str) -> None:
    from distprune.language_models import save_sharded

    with tempfile.TemporaryDirectory() as parent:
        names = [str(Path(parent, "saved"))]
        dist.broadcast_object_list(names)
        save_sharded(model, names[0], source=folder)
        dist.barrier()


def part(parameter: torch.Tensor, whole: Any) -> torch.Tensor:
    """This rank's slice of a tensor in a file, which is read then."""
    if not isinstance(parameter, DTensor):
        return whole[:]
    (placement,) = parameter.placements
    if placement.is_replicate():
        return whole[:]
    size = -(-parameter.shape[placement.dim] // dist.get_world_size())
    start = dist.get_rank() * size
    return whole[start : start + size] if placement.dim == 0 else whole[:, start : start + size]


def slices_of_files(model: Any, folder: str) -> None:
    from safetensors import safe_open

    parameters = dict(model.named_parameters())
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            for name in names:
                own = parameters[name]
                with torch.no_grad():
                    local(own).copy_(part(own, opened.get_slice(name)))


def distributed_checkpoint(model: Any, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    dcp.load(dict(model.state_dict()), storage_reader=HuggingFaceStorageReader(folder))


def check(model: Any, folder: str) -> None:
    """Whether this rank has what the files say.

    Raises:
        CheckFailed: names the parameter.
    """
    from safetensors import safe_open

    parameters = dict(model.named_parameters())
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            for name in names:
                own = parameters[name]
                if not torch.equal(local(own), part(own, opened.get_slice(name))):
                    raise CheckFailed(f"rank {dist.get_rank()}: {name} is not that of the file")
