"""Saved on any sharding, loaded on any other: the same masks and weights, and training goes on.

Weights and masks are compared exactly. The next update to 1e-6, and exactly where the sharding is
the same: other shardings sum gradients in another order.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import distprune as prune
from distprune import checkpoint, schedule
from distprune._common.naming import named_modules
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assembled, assert_nothing_wrong
from helpers.models import EVEN_HIDDEN, Net, fill, fqns, target
from helpers.sampling import THOROUGH

SAVERS = ["fsdp1-3", "fsdp2-4", "hsdp-2x2", "fsdp2_tp-2x2", "tp-2", "ddp-2", "plain-1"]
LOADERS = ["fsdp2-1", "fsdp2-2", "fsdp2-3", "fsdp2-4", "fsdp2_root-2", "hsdp-2x2", "hsdp-1x3"]
LOADERS += ["fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2", "fsdp1_hybrid-2x2"]
LOADERS += ["fsdp2_tp-2x2", "tp-2", "ddp-2", "plain-1"]
ASYNC = ["hsdp-2x2", "tp-2", "plain-1"]
WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
NUM_STEPS = 3  # before the checkpoint; the pruner prunes at steps 1, 3 and 5

Part = dict[str, tuple[Tensor, Tensor]]


class Run:
    """A training run with a schedule, up to the step that it is asked for."""

    def __init__(self, wrapping: str, seed: int = 0, optimizer: type = torch.optim.AdamW):
        dense = fill(Net(EVEN_HIDDEN), "normal", "float32", seed)
        self.wrapping = wrapping
        self.indices = wrappings.local_indices(dense, wrapping)
        self.model = wrappings.wrap(dense, wrapping)
        options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        parameters = self.model.parameters()
        self.optimizer = optimizer(parameters, lr=0.05, weight_decay=0.1, **options)
        ramp = schedule.Linear(1, 5, 2, final_sparsity=0.6, initial_sparsity=0.3)
        self.pruner = schedule.ScheduledPruner(prune.select(self.model), ramp)

    @property
    def everything(self) -> tuple:
        return self.model, self.optimizer, self.pruner

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.pruner.num_steps)
        x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
        part, num_parts = wrappings.data_rank(self.wrapping)
        self.optimizer.zero_grad()
        out = self.model(x.chunk(num_parts)[part])
        F.mse_loss(out, y.chunk(num_parts)[part]).backward()
        self.optimizer.step()
        self.pruner.step()

    def parts(self) -> Part:
        """(values, indices) of what this rank holds of every parameter and mask."""
        modules, parts = dict(named_modules(self.model)), {}
        for name, indices in self.indices.items():
            path, _, parameter = name.rpartition(".")
            mask = modules[path]._buffers.get(parameter + "_mask")
            held = wrappings.shard(self.model, name, self.indices).clone()
            parts[name if mask is None else name + "_orig"] = held, indices
            if mask is not None:
                parts[name + "_mask"] = wrappings.local(mask).clone(), indices
        return parts

    def compare(self, full: dict[str, Tensor], when: str, exact: bool) -> list[str]:
        parts, wrong = self.parts(), []
        if set(parts) != set(full):
            return [f"{when}: {sorted(parts)}, not {sorted(full)}"]
        for name, (held, indices) in parts.items():
            expected = wrappings.my_part(full[name], indices).to(held.dtype)
            tolerance = 0 if exact or name.endswith("_mask") else 1e-6
            if not torch.allclose(held, expected, rtol=0, atol=tolerance):
                wrong.append(f"{when}: {name} is off by {(held.float() - expected).abs().max()}")
        return wrong


def save(wrapping: str, path: str, optimizer: type, is_async: bool) -> tuple[Part, Part]:
    """Train, save, and make one step more: what was held before and after it."""
    run = Run(wrapping, optimizer=optimizer)
    for _ in range(NUM_STEPS):
        run.step()
    state = checkpoint.get_state_dict(*run.everything)
    before = run.parts()
    if is_async:
        # A group of its own: the thread that writes communicates while training goes on.
        group = dist.new_group(backend="gloo")
        future = dcp.async_save(state, checkpoint_id=path, process_group=group)
        run.step()  # what is being written is a copy
        future.result()
    else:
        dcp.save(state, checkpoint_id=path)
        run.step()
    return before, run.parts()


def put_together(per_rank: list[Part]) -> dict[str, Tensor]:
    shapes = {name: parameter.shape for name, parameter in Net(EVEN_HIDDEN).named_parameters()}
    return {
        name: assembled(
            [parts[name] for parts in per_rank],
            shapes[name.removesuffix("_orig").removesuffix("_mask")],
        )
        for name in per_rank[0]
    }


Saved = dict[str, tuple[str, dict[str, Tensor], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    """By wrapping: where the checkpoint is, what was saved, and what came one step later."""
    checkpoints = {}
    for wrapping in SAVERS:
        path = str(tmp_path_factory.mktemp(wrapping))
        per_rank = run_ranks(
            save,
            wrappings.world_size(wrapping),
            wrapping,
            path,
            torch.optim.AdamW,
            wrapping in ASYNC,
        )
        before, after = zip(*per_rank, strict=True)
        checkpoints[wrapping] = path, put_together(before), put_together(after)
    return checkpoints


def load_all(wrapping: str, saved: Saved) -> list[str]:
    """Each checkpoint into a fresh model: dense, pruned in part, or trained with other values.

    By default every second checkpoint, and the one of the same wrapping.
    """
    wrong = []
    for turn, (saver, (path, before, after)) in enumerate(saved.items()):
        if not (THOROUGH or turn % 2 == LOADERS.index(wrapping) % 2 or saver == wrapping):
            continue
        run = Run(wrapping, seed=turn)
        if turn % 3 == 1:
            prune.global_unstructured([prune.select(run.model)[1]], prune.L1Unstructured, amount=9)
        if turn % 3 == 2:
            run.step()
        checkpoint.load(path, *run.everything)
        when = f"{saver} in {wrapping}"
        wrong += run.compare(before, when, exact=True)
        if run.pruner.num_steps != NUM_STEPS:
            wrong.append(f"{when}: the pruner is at step {run.pruner.num_steps}")
        run.step()
        wrong += run.compare(after, f"{when}, one step later", exact=saver == wrapping)
    return wrong


@pytest.mark.parametrize("wrapping", LOADERS)
def test_training_goes_on_from_any_checkpoint(wrapping, saved):
    assert_nothing_wrong(run_ranks(load_all, wrappings.world_size(wrapping), wrapping, saved))


def test_every_wrapper_saves_the_same_keys(saved):
    keys = {
        wrapping: set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        for wrapping, (path, _, _) in saved.items()
    }
    assert {"model.l1.weight_orig", "model.l1.weight_mask", "model.l1.bias"} < keys["plain-1"]
    assert "optimizer.state.l1.weight_orig.exp_avg" in keys["plain-1"]
    for wrapping in SAVERS:
        assert keys[wrapping] == keys["plain-1"], wrapping


def test_a_checkpoint_converts_for_torch_prune(saved, tmp_path):
    path, before, _ = saved["fsdp2-4"]
    dcp_to_torch_save(path, tmp_path / "consolidated.pt")
    state = torch.load(tmp_path / "consolidated.pt", weights_only=False)["model"]
    model = Net(EVEN_HIDDEN)
    for name in WEIGHTS:
        torch_prune.identity(*target(model, name))
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name].float()), name
    folded = checkpoint.fold(state)
    assert list(folded) == fqns(Net())
    Net(EVEN_HIDDEN).load_state_dict(folded)
    for name in WEIGHTS:
        module, parameter = target(model, name)
        torch_prune.remove(module, parameter)
        assert torch.equal(folded[name], getattr(module, parameter))


def sgd(wrapping: str, path: str) -> list[str]:
    before, after = save(wrapping, path, torch.optim.SGD, False)
    run = Run(wrapping, seed=1, optimizer=torch.optim.SGD)
    checkpoint.load(path, *run.everything)
    wrong = []
    for expected in (before, after):
        for name, (held, _) in run.parts().items():
            if not torch.equal(held, expected[name][0]):
                wrong.append(f"{name} differs")
        run.step()
    return wrong


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "fsdp2_tp-2x2", "ddp-2"])
def test_momentum(wrapping, tmp_path):
    assert_nothing_wrong(
        run_ranks(sgd, wrappings.world_size(wrapping), wrapping, str(tmp_path / "checkpoint"))
    )


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
    for unmasked in ("error", "keep", "ones", "sometimes"):
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
        same = all(
            torch.equal(now.get(name + "_orig", now.get(name))[0], value)
            for name, value in weights.items()
        )
        new_masks = [now[f"{name}_mask"][0] for name in ("l1.weight", "l3.weight")]
        kept = all(torch.equal(a, b) for a, b in zip(masks, new_masks, strict=True))
        ones = all(bool(mask.all()) for mask in new_masks)
        run.pruner.num_steps = 101
        run.step()
        now = run.parts()
        as_dense = all(
            torch.allclose(now.get(name + "_orig", now.get(name))[0], value, rtol=0, atol=1e-6)
            for name, value in later.items()
        )
        results[unmasked] = same, kept, ones, as_dense
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
        same, kept, _, as_dense = results["keep"]
        assert same and kept and not as_dense
        assert results["ones"] == (True, results["ones"][1], True, True)


def dense_from_pruned(wrapping: str, path: str, full: dict[str, Tensor]) -> list[str]:
    """Loaded, and folded by remove(), into what was a dense model; its optimizer goes on."""
    run = Run(wrapping, seed=1)
    checkpoint.load(path, *run.everything)
    run.pruner.remove()
    for name in WEIGHTS:
        full[name] = full.pop(name + "_orig") * full.pop(name + "_mask")
    wrong = run.compare(full, "removed", exact=True)
    run.optimizer.step()
    if any(name.endswith("_mask") for name in checkpoint.get_state_dict(run.model)["model"]):
        wrong.append("masks are left")
    return wrong


@pytest.mark.parametrize("wrapping", ["plain-1", "fsdp1-2", "fsdp2-3", "tp-2"])
def test_a_pruned_checkpoint_into_a_dense_model(wrapping, saved):
    path, before, _ = saved["fsdp2-4"]
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(dense_from_pruned, size, wrapping, path, before))


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
    return lambda model: checkpoint.load(path, model, unmasked="ones")


def test_what_torch_misplaces_is_refused(tmp_path):
    per_rank = run_ranks(uneven_strided, 6, str(tmp_path / "checkpoint"))
    assert not all(equal for _, equal in per_rank), "torch saves it now: take the refusal out"
    for messages, _ in per_rank:
        for message in messages:
            assert "l1.weight (shape (7, 6)" in message and "l1.bias" in message
            assert "l2" not in message and "l3" not in message


def differing(path: str) -> str:
    """One rank that asks for something else, or whose file system has no such checkpoint."""
    run = Run("fsdp2-2")
    path = path if dist.get_rank() == 0 else path + "-elsewhere"
    try:
        checkpoint.load(path, run.model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_all_ranks_load_or_none(saved):
    first, second = run_ranks(differing, 2, saved["fsdp2-4"][0])
    assert "on rank 1" in first and "on rank 1" in second


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
    checkpoint.prepare_for_load(model, state)
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
