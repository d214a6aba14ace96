"""Train a small Llama on sharded weights, prune it in steps, and prove what was done.

    torchrun --standalone --nproc-per-node 2 launch/prune_tiny_llama.py --wrap fsdp2

Bytes of the Python standard library are the text. The model is pruned globally by magnitude and,
for comparison, at random, with fine-tuning after each step. Then a single process repeats every
pruning and each rank compares its masks bit for bit; the pruned model is saved and loaded again by
plain transformers. The exit status is 1 when a single mask element differs, or when the saved model
has other zeros than reported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import distprune as prune
from common import Job, join, leave, markdown_table, python_sources

WINDOW = 128  # bytes in one sequence
BATCH = 24  # sequences in one step over all ranks: splits over 1, 2, 3, 4, 6 and 8 ranks
EVALUATED_AT_ONCE = 10  # sequences in one forward pass without training
LEARNING_RATE, FINETUNE_LEARNING_RATE = 1.5e-3, 1e-3
METHODS = {"magnitude": prune.L1Unstructured, "random": prune.RandomUnstructured}
MASKS = "masks.safetensors"


def parse_settings() -> argparse.Namespace:
    """Read the command line; a wrong value ends every rank with the same message."""
    parser = argparse.ArgumentParser(
        description="Train, prune and fine-tune a small Llama on sharded weights.",
        fromfile_prefix_chars="@",  # @configs/NAME.args: one argument per line
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--wrap", choices=("fsdp2", "ddp", "tp"), default="fsdp2", help="how ranks share the model")
    add("--output", type=Path, default=Path("runs/prune_tiny_llama"), help="folder to write")
    add("--steps", type=int, default=350, help="training steps before the first pruning")
    add("--finetune-steps", type=int, default=40, help="training steps after each pruning")
    add("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.9],
        help="share of zeros after each pruning, rising")  # fmt: skip
    add("--held-out-windows", type=int, default=240, help="sequences to measure losses on")
    add("--seed", type=int, default=0, help="of weights, batches and random pruning")
    add("--repeat", type=Path, help=argparse.SUPPRESS)  # a plan: be the single process
    settings = parser.parse_args()
    rising = [0.0, *settings.sparsities, 1.0]
    if any(low >= high for low, high in pairwise(rising)):
        parser.error(f"expected --sparsities between 0 and 1 and rising, got {settings.sparsities}")
    return settings


def build_model() -> LlamaForCausalLM:
    """A decoder of 0.9 million parameters that reads bytes; plain, on the CPU."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,  # tensor parallelism gives each rank whole heads
            num_key_value_heads=4,
            max_position_embeddings=WINDOW,
            tie_word_embeddings=False,
            bos_token_id=None,  # every token is a byte of text, none is special
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def wrap_model(model: LlamaForCausalLM, wrap: str, job: Job) -> nn.Module:
    """Spread a model, which has the same weights on every rank, over all ranks.

    Args:
        wrap: "ddp" copies it to every rank; "fsdp2" gives each rank a slice of every weight; "tp"
            gives each rank some heads and some of the MLP's units.
    """
    model = model.to(job.device)
    if wrap == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(job.device.type, (job.num_ranks,))
    if wrap == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict on rank 0, with plain tensors on the CPU; empty elsewhere. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what rank 0 has from `whole_state`. Collective."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(state), options=options)  # it renames keys in what it gets


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW, one parameter at a time: lists must not mix sharded and plain ones, as under "tp"."""
    return torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.1, foreach=False
    )


def relative_rate(step: int, steps: int) -> float:
    """A share of the highest learning rate: it rises over a tenth of the steps, then falls to 0.1.

    Args:
        step: counted from 1.
    """
    warm_up = max(1, steps // 10)
    if step <= warm_up:
        return step / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean nats per byte of predicting each byte from those before it."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@torch.no_grad()
def mean_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean nats per byte, a float64 scalar; as many windows on each rank."""
    model.eval()
    losses = [language_loss(model, part) for part in windows.split(EVALUATED_AT_ONCE)]
    return torch.stack(losses).double().mean()


class Trainer:
    """Trains and measures models on bytes of Python's standard library.

    Which bytes a step has depends on its seed only, so 1, 2 and 4 ranks train on the same ones.

    Attributes:
        train_bytes: uint8 [num_bytes].
        held_out: int64 [num_windows, WINDOW], from other files.
    """

    def __init__(self, settings: argparse.Namespace, job: Job) -> None:
        self.job, self.steps = job, settings.finetune_steps
        # Ranks of tensor parallelism compute one model together: each reads the whole batch.
        self.part, self.num_parts = (0, 1) if settings.wrap == "tp" else (job.rank, job.num_ranks)
        number = settings.held_out_windows
        if BATCH % self.num_parts or number % (EVALUATED_AT_ONCE * self.num_parts):
            raise ValueError(
                f"{BATCH} sequences of a step, or {number} --held-out-windows in parts of "
                f"{EVALUATED_AT_ONCE}, cannot be split evenly over {self.num_parts} ranks."
            )
        train, held_out = (
            torch.frombuffer(
                bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8
            )
            for files in python_sources(10)
        )
        self.train_bytes = train
        starts = torch.linspace(0, len(held_out) - WINDOW, number, dtype=torch.float64).long()
        self.held_out = self._windows(held_out, starts)

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int, label: str
    ) -> float:
        """Train in place; the held-out loss then. Collective."""
        model.train()
        generator = torch.Generator().manual_seed(seed)
        size = steps, BATCH
        starts = torch.randint(len(self.train_bytes) - WINDOW, size, generator=generator)
        for step, of_step in enumerate(starts, start=1):
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * relative_rate(step, steps)
            part = of_step.chunk(self.num_parts)[self.part]
            tokens = self._windows(self.train_bytes, part)
            loss = language_loss(model, tokens.to(self.job.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0:
                self.job.say(
                    f"{label}: step {step}/{steps}, training loss {float(loss.detach()):.3f}"
                )
        loss_at_end = self.held_out_loss(model)
        self.job.say(f"{label}: {steps} steps, held-out loss {loss_at_end:.3f}")
        return loss_at_end

    def held_out_loss(self, model: nn.Module) -> float:
        """Mean nats per byte over the held-out windows of all ranks; the same on every rank."""
        windows = self.held_out.chunk(self.num_parts)[self.part]
        total = mean_loss(model, windows.to(self.job.device))
        dist.all_reduce(total)
        return float(total) / self.job.num_ranks

    def _windows(self, data: Tensor, starts: Tensor) -> Tensor:
        return data[starts[:, None] + torch.arange(WINDOW)].long()


@dataclass(frozen=True, slots=True)
class Pruning:
    """One call of `global_unstructured`, what it was given, and what came of it."""

    method: str
    sparsity: float
    amount: int  # elements newly pruned
    seed: int  # of torch's default generator just before the call
    state_file: str  # the weights before the call, written by rank 0
    report: prune.PruningReport
    masks: dict[str, Tensor]  # this rank's masks after the call, by parameter
    loss_pruned: float  # held-out nats/byte
    loss_finetuned: float

    @property
    def key(self) -> str:
        return f"{self.method}_{100 * self.sparsity:g}"

    def for_program(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


def prune_in_steps(
    trained: Mapping[str, Tensor],
    method: str,
    settings: argparse.Namespace,
    trainer: Trainer,
    folder: Path,
) -> tuple[nn.Module, list[Pruning]]:
    """Prune a copy of the trained model to each sparsity in turn, fine-tuning after each.

    Both methods see as many steps on the same batches, so their losses differ by the choice of the
    pruned elements only.

    Args:
        trained: the dense model's state on rank 0.
        folder: where rank 0 writes the state before each pruning.

    Returns:
        The pruned, wrapped model with its masks, and one record per sparsity.
    """
    model = wrap_model(build_model(), settings.wrap, trainer.job)
    load_state(model, trained)
    # Made before the first pruning on purpose: an optimizer outlives prunings in real training.
    optimizer = make_optimizer(model, FINETUNE_LEARNING_RATE)
    targets = prune.select(model)
    num_elements = sum(getattr(module, name).numel() for module, name in targets)  # of all shards
    prunings: list[Pruning] = []
    num_pruned = 0
    for number, sparsity in enumerate(settings.sparsities):
        label = f"{method} {100 * sparsity:g} %"
        amount = round(sparsity * num_elements) - num_pruned
        num_pruned += amount
        state, state_file = whole_state(model), f"{method}_{number}.safetensors"
        if trainer.job.rank == 0:
            save_file(state, folder / state_file)
        seed = settings.seed + number
        torch.manual_seed(seed)
        report = prune.global_unstructured(targets, METHODS[method], amount=amount)
        if report.num_pruned != num_pruned:
            raise RuntimeError(f"{label}: {report.num_pruned=}, expected exactly {num_pruned}.")
        masks = prune.get_masks(targets)
        loss_pruned = trainer.held_out_loss(model)
        trainer.job.say(f"{label}: {num_pruned:,} of {num_elements:,} pruned, {loss_pruned:.3f}")
        loss = trainer.train(model, optimizer, trainer.steps, seed + 1, f"{label}, fine-tuning")
        prunings.append(
            Pruning(
                method, sparsity, amount, seed, state_file, report,
                {pair.fqn: mask for pair, mask in zip(targets, masks, strict=True)},
                loss_pruned, loss,
            )
        )  # fmt: skip
    return model, prunings


def train_on(
    trained: Mapping[str, Tensor], settings: argparse.Namespace, trainer: Trainer
) -> list[float]:
    """The dense model's held-out loss after as many further steps as each pruned one has had.

    The training is short, so fine-tuning lowers the loss of any model.
    """
    model = wrap_model(build_model(), settings.wrap, trainer.job)
    load_state(model, trained)
    optimizer = make_optimizer(model, FINETUNE_LEARNING_RATE)
    return [
        trainer.train(model, optimizer, trainer.steps, settings.seed + number, f"dense {number}")
        for number in range(1, len(settings.sparsities) + 1)
    ]


def compare_masks(
    prunings: list[Pruning], settings: argparse.Namespace, job: Job, folder: Path
) -> list[dict[str, int]]:
    """Let a single process repeat all prunings, and compare what each rank holds with its masks.

    Returns:
        For each pruning the mask elements compared and differing, summed over ranks.
    """
    if job.rank == 0:
        names = ("method", "key", "amount", "seed", "state_file")
        plan = folder / "plan.json"
        plan.write_text(json.dumps([pruning.for_program(*names) for pruning in prunings]))
        distributed = ("MASTER_", "TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_", "RANK", "WORLD_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(distributed)}
        subprocess.run([sys.executable, __file__, "--repeat", plan], env=clean, check=True)
    dist.barrier()
    expected = load_file(folder / MASKS)
    found = []
    for pruning in prunings:
        counts = torch.zeros(2, dtype=torch.int64, device=job.device)
        for name, mask in pruning.masks.items():
            local, same_part = _local_parts(mask, expected[f"{pruning.key}/{name}"])
            counts += counts.new_tensor([local.numel(), int((local != same_part).sum())])
        dist.all_reduce(counts)
        found.append(dict(zip(("num_compared", "num_differing"), counts.tolist(), strict=True)))
    return found


def _local_parts(mask: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank holds of a mask, and the same part of the expected one.

    torch's own `distribute_tensor` cuts the latter: a wrong slice in distprune cannot hide itself.
    """
    expected = expected.to(mask.device)
    if isinstance(mask, DTensor):
        expected = distribute_tensor(
            expected, mask.device_mesh, mask.placements, src_data_rank=None
        ).to_local()
        mask = mask.to_local()
    if mask.shape != expected.shape:
        raise ValueError(f"a mask has shape {mask.shape}, expected {expected.shape}.")
    return mask, expected


def repeat_prunings(plan_file: Path) -> None:
    """Be the single process: no wrapper, no DTensor, no other process.

    It shares with the job the unpruned weights before each pruning, which it could not have trained
    bit for bit alike (sums over ranks round differently). Masks are never read from the job: from
    the second pruning on, the earlier masks are this process's own.
    """
    masks: dict[str, Tensor] = {}
    plan = json.loads(plan_file.read_text())
    for method, pruning_method in METHODS.items():
        if method == "random":
            # Without a group, random pruning takes its numbers from torch's generator, as torch
            # does. With one of any size, a number depends on the seed and the element's index.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = build_model()
        targets = prune.select(model)
        for step in (step for step in plan if step["method"] == method):
            state = load_file(plan_file.parent / step["state_file"])
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    plain = name.removesuffix("_orig")
                    parameter.copy_(state[name] if name in state else state[plain])
            torch.manual_seed(step["seed"])
            prune.global_unstructured(targets, pruning_method, amount=step["amount"])
            for pair, mask in zip(targets, prune.get_masks(targets), strict=True):
                masks[f"{step['key']}/{pair.fqn}"] = mask
    save_file(masks, plan_file.parent / MASKS)
    leave()


def save_model(
    model: nn.Module, folder: Path, trainer: Trainer, report: prune.PruningReport
) -> list[str]:
    """Save the model for plain transformers, load it, and compare. Collective.

    Returns:
        A sentence for each parameter with other zeros than reported, and for another loss; on
        every rank.
    """
    job = trainer.job
    masks = {k: v.bool() for k, v in whole_state(model).items() if k.endswith("_mask")}
    for module, name in prune.select(model):
        prune.remove(module, name)  # the zeros are permanent, the modules ordinary again
    loss = trainer.held_out_loss(model)
    state = whole_state(model)

    def save_and_load() -> list[str]:
        disable_progress_bar()  # of one file that is written and read at once
        plain = build_model()
        plain.load_state_dict(state)
        plain.save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder)
        weights, faults = dict(loaded.named_parameters()), []
        for entry in report.parameters:
            # Training can leave a kept weight at exactly 0.0.
            kept_zeros = int(((state[entry.name] == 0) & masks[f"{entry.name}_mask"]).sum())
            found, expected = int((weights[entry.name] == 0).sum()), entry.num_pruned + kept_zeros
            if found != expected:
                faults.append(f"{entry.name} was loaded with {found} zeros, expected {expected}")
        found = float(mean_loss(loaded, trainer.held_out))
        if not math.isclose(found, loss, rel_tol=1e-5):
            faults.append(f"the loaded model's held-out loss is {found}, expected {loss}")
        return faults

    return job.on_rank_0(save_and_load)


def loss_table(prunings: list[Pruning], loss_dense: float, losses_trained_on: list[float]) -> str:
    """Held-out loss by sparsity and method."""
    rows = [
        ("sparsity", "pruned elements", "magnitude, after pruning", "magnitude, after fine-tuning",
         "random, after pruning", "random, after fine-tuning", "dense, as many steps"),
        ("0 %", "0", *[f"{loss_dense:.3f}"] * 5),
    ]  # fmt: skip
    by_magnitude, at_random = ([p for p in prunings if p.method == method] for method in METHODS)
    for *both, dense in zip(by_magnitude, at_random, losses_trained_on, strict=True):
        losses = [loss for p in both for loss in (p.loss_pruned, p.loss_finetuned)]
        numbers = [f"{loss:.3f}" for loss in (*losses, dense)]
        rows.append((f"{100 * both[0].sparsity:g} %", f"{both[0].report.num_pruned:,}", *numbers))
    return markdown_table(rows)


def mask_table(prunings: list[Pruning], comparisons: list[dict[str, int]]) -> str:
    """Differing mask elements per pruning."""
    rows = [("pruning", "mask elements compared, all ranks", "differing from the single process")]
    for pruning, found in zip(prunings, comparisons, strict=True):
        name = f"{pruning.method}, {100 * pruning.sparsity:g} %"
        rows.append((name, f"{found['num_compared']:,}", f"{found['num_differing']:,}"))
    return markdown_table(rows)


def main() -> None:
    settings = parse_settings()
    if settings.repeat:
        repeat_prunings(settings.repeat)
    output = settings.output
    folder = output / "single_process"  # what the single process reads and writes
    folder.mkdir(parents=True, exist_ok=True)
    job = join()
    job.say(f"{job.num_ranks} ranks on {job.device.type}, {settings.wrap}; losses in nats per byte")
    trainer = Trainer(settings, job)
    torch.manual_seed(settings.seed)  # the same first weights on every rank
    model = wrap_model(build_model(), settings.wrap, job)
    optimizer = make_optimizer(model, LEARNING_RATE)
    loss_dense = trainer.train(model, optimizer, settings.steps, settings.seed, "training")
    trained = whole_state(model)
    pruned_model, by_magnitude = prune_in_steps(trained, "magnitude", settings, trainer, folder)
    _, at_random = prune_in_steps(trained, "random", settings, trainer, folder)
    losses_trained_on = train_on(trained, settings, trainer)
    report = by_magnitude[-1].report
    job.say(f"the last pruning by magnitude\n\n{report}\n")

    faults = save_model(pruned_model, output / "model", trainer, report)
    job.say("a single process repeats every pruning")
    prunings = by_magnitude + at_random
    comparisons = compare_masks(prunings, settings, job, folder)
    losses = loss_table(prunings, loss_dense, losses_trained_on)
    tables = f"held-out loss, nats per byte\n\n{losses}\n\n{mask_table(prunings, comparisons)}"
    job.say(f"{tables}\n")
    saved = f"saved model: {'; '.join(faults) or 'as reported'}"
    if job.rank == 0:
        (output / "results.md").write_text(f"{tables}\n\n{saved}\n")
        numbers = {
            "settings": vars(settings),
            "num_ranks": job.num_ranks,
            "loss_dense": loss_dense,
            "losses_trained_on": losses_trained_on,
            "prunings": [
                pruning.for_program("method", "sparsity", "amount", "loss_pruned", "loss_finetuned")
                | found
                | {"report": asdict(pruning.report)}
                for pruning, found in zip(prunings, comparisons, strict=True)
            ],
            "saved_model_faults": faults,
            "seconds": time.monotonic() - job.started,
        }
        (output / "results.json").write_text(json.dumps(numbers, indent=1, default=str))
    failed = bool(faults) or any(found["num_differing"] for found in comparisons)
    job.say(f"{saved}; results in {output}{'; FAILED' if failed else ''}")
    leave(failed=failed)


if __name__ == "__main__":
    main()
