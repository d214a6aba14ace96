"""Checkpoints of dense models and of torch into pruned ones, keys, and what is refused."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from training_runs import Run

import distprune as prune
from distprune import checkpoint
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.models import EVEN_HIDDEN, Net, fill, target


def mixed_structure(wrapping: str, path: str) -> dict[str, object]:
    """A checkpoint made dense, and models of which two layers are pruned."""
    run = Run(wrapping)
    run.pruner.num_steps = 100  # nothing is due
    run.step()
    weights = {name: held for name, (held, _) in run.parts().items()}
    dcp.save(checkpoint.get_state_dict(run.model, run.optimizer), checkpoint_id=path)
    run.step()
    later = {name: held for name, (held, _) in run.parts().items()}
    results: dict[str, object] = {}
    for unmasked in ("error", "keep", "sometimes"):
        run = Run(wrapping, seed=1)
        pruned = prune.select(run.model, ["l1", "l3"])
        prune.global_unstructured(pruned, prune.L1Unstructured, amount=0.5)
        held = run.parts()
        masks = [held[f"{name}_mask"][0] for name in ("l1.weight", "l3.weight")]
        try:
            checkpoint.load(path, run.model, run.optimizer, unmasked=unmasked)
        except ValueError as error:
            changed = [
                n for n, (part, _) in run.parts().items() if not torch.equal(part, held[n][0])
            ]
            results[unmasked] = str(error), changed
            continue
        now = run.parts()
        same = True
        for name, value in weights.items():
            mask = now.get(f"{name}_mask", (torch.ones(()),))[0]
            same &= torch.equal(now[name][0], value * mask)
        new_masks = [now[f"{name}_mask"][0] for name in ("l1.weight", "l3.weight")]
        kept = all(torch.equal(a, b) for a, b in zip(masks, new_masks, strict=True))
        run.pruner.num_steps = 101
        run.step()
        now = run.parts()
        as_dense = all(
            torch.allclose(now[name][0], value, rtol=0, atol=1e-6) for name, value in later.items()
        )
        results[unmasked] = same, kept, as_dense
    return results


@pytest.mark.parametrize(
    "wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "fsdp2_root-3", "tp-2"]
)
def test_a_dense_checkpoint_into_a_pruned_model(wrapping, tmp_path):
    size = wrappings.world_size(wrapping)
    for results in run_ranks(mixed_structure, size, wrapping, str(tmp_path / "checkpoint")):
        message, changed = results["error"]
        assert "l1.weight, l3.weight: pruned" in message and "unmasked='keep'" in message
        assert changed == []
        assert "unmasked='sometimes'" in results["sometimes"][0]
        assert results["keep"] == (True, True, False)


def names_when_wrapped(how: str) -> set[str]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model: nn.Module = fill(Net(EVEN_HIDDEN), "normal", "float32")
    if "ac" in how:
        model.l2 = checkpoint_wrapper(model.l2)
    if "ddp" in how:
        model = nn.parallel.DistributedDataParallel(model)
    if "compile" in how:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = checkpoint.get_state_dict(model, optimizer)
    return {*state["model"], *(f"{name} state" for name in state["optimizer"]["state"])}


def test_keys_have_no_wrapper_prefixes():
    wrapped = ["plain", "ac", "ddp", "compile", "ddp and ac", "ddp, compile and ac"]
    for plain, *others in zip(
        *(run_ranks(names_when_wrapped, 2, how) for how in wrapped), strict=True
    ):
        assert {"l2.weight_mask", "l2.weight_orig", "l2.weight_orig state"} < plain
        for names in others:
            assert names == plain


def uneven_strided(path: str) -> tuple[list[str], bool]:
    """7 rows on a 3x2 mesh: DCP takes the shards of the last ranks for others."""
    messages = []
    model = wrappings.wrap(fill(Net((6, 7, 7, 3)), "normal", "float32"), "fsdp2_tp-3x2")
    before = {name: wrappings.local(value).clone() for name, value in model.state_dict().items()}
    dcp.save(model.state_dict(), checkpoint_id=path)
    loaded = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(loaded, checkpoint_id=path)
    equal = all(torch.equal(wrappings.local(value), before[name]) for name, value in loaded.items())
    prune.l1_unstructured(model.l2, "weight", 0.5)
    for call in (checkpoint.get_state_dict, checkpoint.check_writable, checkpoint_load(path)):
        with pytest.raises(NotImplementedError) as error:
            call(model)
        messages.append(str(error.value))
    return messages, equal


def checkpoint_load(path: str):
    return lambda model: checkpoint.load(path, model, unmasked="keep")


def test_what_torch_misplaces_is_refused(tmp_path):
    per_rank = run_ranks(uneven_strided, 6, str(tmp_path / "checkpoint"))
    assert not all(equal for _, equal in per_rank), "torch saves it now: take the refusal out"
    for messages, _ in per_rank:
        for message in messages:
            assert "l1.weight (shape (7, 6)" in message and "l1.bias" in message
            assert "l2" not in message and "l3" not in message


class Tied(Net):
    """The last layer shares its weight with the second one."""

    def __init__(self):
        super().__init__((6, 12, 12, 12))
        self.l3.weight = self.l2.weight


def from_torch(wrapping: str, state: dict[str, Tensor], x: Tensor, tied: bool) -> Tensor:
    """A consolidated state dict of a model that torch pruned, into a fresh and dense one."""
    options = StateDictOptions(full_state_dict=True)
    model = wrappings.wrap(Tied() if tied else Net(EVEN_HIDDEN), wrapping)
    names = {name.removesuffix("_mask") for name in state if name.endswith("_mask")}
    state = checkpoint.prepare_for_load(model, state)
    keys = set(state)  # torch renames them in place under DDP
    set_model_state_dict(model, state, options=options)
    out = model(x).detach()
    again = get_model_state_dict(model, options=options)
    assert set(again) == keys
    folded = checkpoint.fold(wrappings.unwrapped(model).state_dict())
    for name in names:
        module, parameter = target(wrappings.unwrapped(model), name)
        if not prune.is_pruned(module):
            continue  # went with the one that it is tied to
        prune.remove(module, parameter)
        if not torch.equal(
            wrappings.local(folded[name]), wrappings.local(getattr(module, parameter))
        ):
            raise AssertionError(f"{name}: fold is not remove")
    return out


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp2-3", "fsdp2_root-2", "tp-2"])
def test_a_state_dict_of_torch_loads_into_a_fresh_model(wrapping):
    for tied in (False, True):
        if tied and wrapping not in ("plain-1", "ddp-2", "fsdp2_root-2"):
            continue  # torch itself unties them or refuses
        dense = Tied() if tied else fill(Net(EVEN_HIDDEN), "normal", "float32")
        torch_prune.l1_unstructured(dense.l1, "bias", 0.5)
        for layer in (dense.l2, dense.l3) if tied else (dense.l2,):
            torch_prune.l1_unstructured(layer, "weight", 0.5)
        x = torch.randn(3, 6)
        expected, state = dense(x).detach(), dense.state_dict()
        size = wrappings.world_size(wrapping)
        for out in run_ranks(from_torch, size, wrapping, state, x, tied):
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_fold():
    values = torch.tensor([1.0, -2.0, -0.0, torch.inf, torch.nan, 3.0])
    keep = torch.tensor([1, 1, 0, 0, 0, 0])
    state = {
        "a.b_orig": values,
        "causal_mask": keep,
        "c": values,
        "a.b_mask": keep.bool(),
        "lonely_orig": values,
    }
    before = dict(state)
    folded = checkpoint.fold(state)
    assert list(folded) == ["a.b", "causal_mask", "c", "lonely_orig"]
    assert folded["a.b"].numpy().tobytes() == torch.tensor([1.0, -2, 0, 0, 0, 0]).numpy().tobytes()
    assert all(folded[name] is state[name] for name in ("causal_mask", "c", "lonely_orig"))
    assert all(state[name] is before[name] for name in before) and len(state) == len(before)
