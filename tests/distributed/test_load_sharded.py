"""language_models.load_sharded: on every wrap the model of from_pretrained on one process."""

from functools import cache

import pytest
import torch

from distprune.testing import run_ranks
from helpers.tiny_transformers import save_tiny

transformers = pytest.importorskip("transformers")

# Tied and untied, biases, norms of heads, scaled embeddings, merged experts, transposed weights.
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "mixtral", "gpt2"]
WRAPS = {
    "none": ("none", None, 1),
    "ddp": ("ddp", None, 2),
    "fsdp2": ("fsdp2", None, 2),
    "fsdp2-4": ("fsdp2", None, 4),
    "hsdp-2x2": ("fsdp2", (2, 2), 4),
    "tp": ("tp", None, 2),
    "fsdp2_tp-2x2": ("fsdp2_tp", (2, 2), 4),
}
CASES = [("llama", wrap) for wrap in WRAPS]
CASES += [(family, wrap) for family in FAMILIES[1:] for wrap in ("none", "fsdp2", "tp")]
CASES.remove(("mixtral", "tp"))  # torch multiplies no experts in float64


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of several files, by family; each is made once."""
    return cache(
        lambda family: save_tiny(
            family, tmp_path_factory.mktemp(family) / "model", max_shard_size="10KB"
        )
    )


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compared(folder, wrap, mesh, dtype):
    """Differences from from_pretrained in state and logits, and the largest among logits."""
    from distprune import language_models

    model = language_models.load_sharded(folder, wrap=wrap, mesh=mesh, dtype=dtype)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    inner = model.module if wrap == "ddp" else model
    assert not model.training and not inner.training
    assert inner.generation_config.to_dict() == expected.generation_config.to_dict()
    assert inner.all_tied_weights_keys == expected.all_tied_weights_keys
    differences = []
    for kind in ("named_parameters", "named_buffers"):
        ours = dict(getattr(inner, kind)(remove_duplicate=False))
        theirs = dict(getattr(expected, kind)(remove_duplicate=False))
        assert list(ours) == list(theirs)
        differences += [
            name
            for name, tensor in ours.items()
            if tensor.dtype != theirs[name].dtype or not torch.equal(whole(tensor), theirs[name])
        ]
        # Tied alike.
        assert len({id(t) for t in ours.values()}) == len({id(t) for t in theirs.values()})
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = model(input_ids=tokens).logits, expected(input_ids=tokens).logits
    return differences, torch.equal(ours, theirs), float((ours - theirs).abs().max())


@pytest.mark.parametrize(("family", "wrap"), CASES)
def test_model_is_that_of_from_pretrained(folders, family, wrap):
    kind, mesh, num_ranks = WRAPS[wrap]
    if family == "gpt2" and kind == "tp":
        with pytest.raises(AssertionError, match="has no `tp_plan`"):
            run_ranks(compared, num_ranks, folders(family), kind, mesh, None)
        return
    # Tensor parallelism sums products in another order; in float64 that is rounding.
    dtype = torch.float64 if "tp" in kind else None
    for differences, is_equal, error in run_ranks(
        compared, num_ranks, folders(family), kind, mesh, dtype
    ):
        assert not differences
        assert error < 1e-10 if "tp" in kind else is_equal
