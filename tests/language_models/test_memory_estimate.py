"""The estimate of memory, beside what the system counts for a process of its own."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")


def measure(wrapping, gradients):
    """Print the estimate, and how much a process has grown while it ran."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    import distprune as prune
    from distprune import criteria, language_models
    from distprune._common.memory import peak_rss_bytes

    torch.set_num_threads(1)
    sizes = {"vocab_size": 1 << 17, "hidden_size": 128, "intermediate_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).eval()
    if wrapping == "fsdp2":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    tokens = torch.randint(1 << 17, (1, 512))
    windows = language_models.TokenWindows(
        ("text",), tokens, torch.zeros(1, dtype=torch.int64), None, False
    )
    parameters = prune.select(model)
    read = [getattr(*pair) for pair in parameters] if gradients else []
    estimate = language_models.estimate_memory(model, 512, gradients_of=read, values_kept=1)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    if gradients:
        language_models.calibrate(model, windows, criteria.Fisher(parameters, unit="rank_batch"))
    else:
        language_models.perplexity(model, windows)
    grown = peak_rss_bytes() - pages * resource.getpagesize()
    print(estimate.total - estimate.parts["weights"], grown)
    print(estimate)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapping", "gradients"),
    [pytest.param("none", 0, marks=pytest.mark.thorough), ("fsdp2", 1)],
)
def test_it_is_at_most_twice_what_a_process_grows_by(wrapping, gradients):
    command = [sys.executable, __file__, wrapping, str(gradients)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    numbers, parts = done.stdout.splitlines()
    estimated, grown = map(int, numbers.split())
    # The allocator and the libraries take some tens of megabytes that are no part of it.
    assert estimated / 2 <= grown <= estimated + (64 << 20), (numbers, parts)
    assert ("gradients" in parts) == bool(gradients)
    assert ("gathered weights" in parts) == (wrapping == "fsdp2")


if __name__ == "__main__":
    measure(sys.argv[1], int(sys.argv[2]))
