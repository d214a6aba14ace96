"""The operations of a sequence: for each, what the oracle does and what the sharded model does."""

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

import distprune as prune
from distprune import checkpoint
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.models import values
from helpers.random_sequences.oracle import Counts, Refused, places
from helpers.random_sequences.plans import INPUTS
from helpers.random_sequences.state import SideBySide, bounds, by_name

Act = Callable[[], Any]
Both = tuple[Act, Act]  # what the oracle does, and what the sharded model does


class BelowLimit(prune.BasePruningMethod):
    """A user's method: a function of each element alone."""

    PRUNING_TYPE = "unstructured"
    DISTRIBUTED = "elementwise"

    def __init__(self, limit):
        self.limit = limit

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() >= self.limit)


class Undeclared(BelowLimit):
    """The same, as torch's methods are; it cannot be run on shards."""

    DISTRIBUTED = None


class LowestSigned(prune.BasePruningMethod):
    """Scores of each element alone, compared over all; the most negative go first."""

    PRUNING_TYPE = "unstructured"
    DISTRIBUTED = "scores"

    def __init__(self, amount):
        self.amount = amount

    def compute_scores(self, t):
        return 2 * t


class Run(SideBySide):
    """Every method is an operation of plans.py: it returns two calls and changes nothing."""

    def global_l1(
        self,
        names: Sequence[str],
        amount: Any,
        scores: dict[str, Any] | None,
        low: Any = None,
        high: Any = None,
        inference: bool = False,
    ) -> Both:
        names, pairs = self.targets(names)
        whole = self.scores(scores)
        parts = self.shards_of(whole) if scores and scores.get("sharded") else whole
        given = {
            pair: parts[name] for name, pair in zip(names, pairs, strict=True) if name in whole
        }
        low, high = by_name(names, low), by_name(names, high)

        def act() -> prune.PruningReport:
            limits = bounds(pairs, names, low, high)
            targets = iter([*pairs, *pairs[:1]])  # an iterator, with one parameter in it twice
            with torch.inference_mode(inference):
                return prune.global_unstructured(
                    targets, prune.L1Unstructured, given or None, amount=amount, **limits
                )

        return lambda: self.oracle.rank(names, amount, scores=whole, low=low, high=high), act

    def global_random(
        self, names: Sequence[str], amount: Any, low: Any, high: Any, seed: int
    ) -> Both:
        names, pairs = self.targets(names)
        low, high = by_name(names, low), by_name(names, high)

        def act() -> prune.PruningReport:
            torch.manual_seed(seed + dist.get_rank())  # the ranks agree on the first one's
            given = bounds(pairs, names, low, high)
            return prune.global_unstructured(
                pairs, prune.RandomUnstructured, amount=amount, **given
            )

        def expect() -> Counts:
            ranks = self.oracle.random_ranks(names, seed)
            return self.oracle.rank(names, amount, ranks=ranks, low=low, high=high)

        return expect, act

    def scores(self, given: dict[str, Any] | None) -> dict[str, Tensor]:
        if given is None:
            return {}
        generator = torch.Generator().manual_seed(given["seed"])
        drawn = {}
        for name in given["names"]:
            shape, dtype = self.oracle.value(name).shape, getattr(torch, given["dtype"])
            if given["data"] == "tiny":
                drawn[name] = torch.randn(shape, generator=generator, dtype=dtype) * 1e-60
            elif dtype == torch.int64:
                drawn[name] = torch.randint(-9, 10, shape, generator=generator)
            else:
                drawn[name] = values(given["data"], shape, dtype, generator)
        return drawn

    def shards_of(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, laid out as the parameters are."""
        scorer = self.filled(0)
        for name, tensor in whole.items():
            scorer.get_parameter(name).data.copy_(tensor)
        scorer = wrappings.wrap(scorer, self.wrapping)
        return {
            name: wrappings.shard(scorer, name, self.indices, as_dtensor=True) for name in whole
        }

    def single_l1(self, name: str, amount: Any) -> Both:
        return (
            lambda: self.oracle.rank([name], amount),
            lambda: ignored(prune.l1_unstructured(*self.target(name), amount)),
        )

    def single_random(self, name: str, amount: Any, seed: int) -> Both:
        def expect() -> None:
            if self.is_sharded(name):
                self.oracle.rank([name], amount, ranks=self.oracle.random_ranks([name], seed))
            else:
                self.oracle.random_of_torch(name, amount, seed)

        return expect, self.seeded(seed, prune.random_unstructured, name, amount)

    def seeded(self, seed: int, call: Callable, name: str, *arguments: Any) -> Act:
        """A call with a seed: of a sharded parameter that of its first rank, else of every rank."""

        def act() -> None:
            torch.manual_seed(seed + (dist.get_rank() if self.is_sharded(name) else 0))
            call(*self.target(name), *arguments)

        return act

    def norm_channels(self, name: str, amount: Any, dim: int, n: float) -> Both:
        return (
            lambda: self.oracle.norms(name, amount, n, dim),
            lambda: ignored(prune.ln_structured(*self.target(name), amount, n, dim)),
        )

    def random_channels(self, name: str, amount: Any, dim: int, seed: int) -> Both:
        return (
            lambda: self.oracle.random_channels(name, amount, dim, seed),
            self.seeded(seed, prune.random_structured, name, amount, dim),
        )

    def custom(self, name: str, share: float, dtype: str, seed: int) -> Both:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(self.oracle.value(name).shape, generator=generator) < share
        given = mask.to(getattr(torch, dtype))
        if seed % 2 and not self.kind.startswith("fsdp1"):
            given = self.shards_of({name: mask})[name] != 0
        return (
            lambda: self.oracle.custom(name, mask),
            lambda: ignored(prune.custom_from_mask(*self.target(name), given)),
        )

    def identity(self, name: str) -> Both:
        ones = torch.ones_like(self.oracle.mask(name))
        return (
            lambda: self.oracle.custom(name, ones),
            lambda: ignored(prune.identity(*self.target(name))),
        )

    def segments(self, names: Sequence[str], scope: str, amount: float) -> Both:
        names, pairs = self.targets(names)

        def groups_of(name: str) -> list:
            shape = self.oracle.value(name).shape
            if scope == "layer" or not shape:
                return [list(range(shape.numel()))]
            inputs = tuple(range(1, len(shape))) if len(shape) > 1 else (0,)
            return reference.rows_of(shape, INPUTS.get(name, inputs))

        return (
            lambda: self.oracle.segments(names, groups_of, lambda size: round(amount * size)),
            lambda: prune.global_unstructured(
                pairs, prune.L1Unstructured, scope=scope, amount=amount,
                input_dims=self.input_dims(pairs),
            ),
        )  # fmt: skip

    def pattern(self, pattern: str) -> Both:
        """N:M of every weight that the pattern fits."""
        n, m = map(int, pattern.split(":"))
        input_of = {name: INPUTS.get(name, (1,))[0] for name in self.indices}
        names = [
            name
            for name, dim in input_of.items()
            if self.oracle.value(name).ndim > 1 and self.oracle.value(name).shape[dim] % m == 0
        ]
        if not names:
            return ignored, ignored
        names, pairs = self.targets(names)

        def groups_of(name: str) -> list:
            return reference.groups_along(self.oracle.value(name).shape, input_of[name], m)

        return (
            lambda: self.oracle.segments(names, groups_of, lambda size: m - n),
            lambda: prune.global_unstructured(
                pairs, prune.L1Unstructured, pattern=pattern, input_dims=self.input_dims(pairs)
            ),
        )

    @staticmethod
    def input_dims(pairs: Sequence[Any]) -> dict | None:
        return {tuple(pair): 1 for pair in pairs if pair[1] == "gate_up"} or None

    def own_method(self, names: Sequence[str], limit: float | None, amount: Any) -> Both:
        """A method of the user's: of all parameters together, or of one."""
        names, pairs = list(names), [self.target(name) for name in names]
        method = LowestSigned if amount is not None else BelowLimit
        if amount is None and self.kind in ("plain", "ddp") and len(names) % 2:
            method = Undeclared
        arguments = {"limit": limit} if amount is None else {"amount": amount}

        def expect() -> None:
            if amount is not None:
                ranks = {name: self.oracle.value(name) for name in names}
                self.oracle.rank(names, amount, ranks=ranks, key=float)
                return
            for name in names:
                self.oracle.custom(name, self.oracle.value(name).abs() >= limit)

        def act() -> None:
            if len(pairs) == 1:
                method.apply(*pairs[0], **arguments)
            else:
                prune.global_unstructured(pairs, method, **arguments)

        return expect, act

    def global_mask(
        self, names: Sequence[str], k: int, largest: bool, share: float | None, seed: int
    ) -> Both:
        """Select among candidates, or by random scores; nothing changes."""
        names, pairs = list(names), [self.target(name) for name in names]
        whole = self.random_masks(names, share or 1.0, seed)
        expected: list[Tensor] = []
        options = {"candidates": list(whole.values())} if share else {}
        is_random = not largest and not share
        if is_random:
            options = {"scores": "random"}

        def expect() -> None:
            ranks = self.oracle.random_ranks(names, seed) if is_random else {}
            expected.extend(self.oracle.largest(names, k, list(whole.values()), largest, ranks))

        def act() -> None:
            torch.manual_seed(seed + dist.get_rank())
            found = prune.global_mask(pairs, k, largest=largest, **options)
            for name, mask, selected in zip(names, found.masks, expected, strict=True):
                part = wrappings.my_part(selected, self.indices[name])
                if not torch.equal(wrappings.local(mask), part):
                    self.wrong.append(f"global_mask, {name}: {mask} is not {part}")

        return expect, act

    def random_masks(self, names: Sequence[str], share: float, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.rand(self.oracle.value(name).shape, generator=generator) < share
            for name in names
        }

    def set_masks(
        self, names: Sequence[str], share: float, with_optimizer: bool, seed: int
    ) -> Both:
        masks = self.random_masks(names, share, seed)
        old = {name: self.oracle.mask(name) for name in names}
        pairs = [self.target(name) for name in names]
        given = list(masks.values())
        if seed % 2:
            given = [part != 0 for part in self.shards_of(masks).values()]
        optimizer = self.optimizer if with_optimizer else None

        def act() -> None:
            report = prune.set_masks(pairs, given, optimizer=optimizer)
            for name, entry in zip(names, report.parameters, strict=True):
                grown, gone = masks[name] & ~old[name], old[name] & ~masks[name]
                if (entry.num_grown, entry.num_pruned_now) != (int(grown.sum()), int(gone.sum())):
                    self.wrong.append(f"set_masks, {name}: {entry}")
            for name, mask in zip(names, prune.get_masks(pairs), strict=True):
                part = wrappings.my_part(masks[name], self.indices[name])
                if not torch.equal(wrappings.local(mask), part):
                    self.wrong.append(f"get_masks, {name}: {mask} is not {part}")

        return lambda: self.oracle.set_masks(masks, with_optimizer), act

    def masks_from_zeros(self, names: Sequence[str]) -> Both:
        pairs = [self.target(name) for name in names]
        return (
            lambda: self.oracle.masks_from_zeros(names),
            lambda: ignored(prune.masks_from_zeros(pairs, all_zero="prune")),
        )

    def schedule(self) -> Both:
        if self.pruner is None:
            self.pruner = self.new_pruner()
        names = [pair.fqn for pair in prune.select(self.model, everything=True)]

        def expect() -> Counts | None:
            oracle, step = self.oracle, self.oracle.num_steps
            oracle.num_steps += 1
            if not self.ramp.is_due(step):
                return None
            oracle.sparsity = max(oracle.sparsity, self.ramp.sparsity_at(step))
            total = sum(oracle.value(name).numel() for name in names)
            k = round(oracle.sparsity * total) - sum(map(oracle.num_pruned, names))
            return oracle.rank(names, k) if k > 0 else None

        def act() -> prune.PruningReport | None:
            is_due = self.ramp.is_due(self.pruner.num_steps)
            with Traffic() as traffic:
                report = self.pruner.step()
            self.wrong += ["a step that is not due sends"] * bool(traffic.calls and not is_due)
            found = self.pruner.num_steps, self.pruner.sparsity
            if found != (self.oracle.num_steps, self.oracle.sparsity):
                self.wrong.append(f"the pruner is at {found}")
            return report

        return expect, act

    def remove(self, name: str) -> Both:
        return lambda: self.oracle.remove(name), lambda: self.remove_here(name)

    def remove_all(self) -> Both:
        names = list(self.oracle.masks)

        def act() -> None:
            for name in names:
                self.remove_here(name)

        return lambda: ignored([self.oracle.remove(name) for name in names]), act

    def remove_here(self, name: str) -> None:
        """Remove under all names of a tied parameter; on FSDP the first call may remove all."""
        module, leaf = self.target(name)
        prune.remove(module, leaf)
        self.reshard()
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.kind != "fsdp1_flat" and not any(module._parameters[leaf] is p for p in trained):
            self.wrong.append(f"{name} is another Parameter object")
        if not module._buffers:
            self.wrong += [f"left: {key}" for key in vars(module) if key.startswith("_distprune")]
        is_tied = (self.plan.family, name) == ("tied", "embedding.weight")
        if is_tied and prune.is_pruned(self.modules["head"]):
            prune.remove(self.modules["head"], "weight")
        held, keep = self.held(name), wrappings.my_part(self.oracle.value(name), self.indices[name])
        if (held.signbit() & (held == 0) & ~keep.signbit()).any():
            self.wrong.append(f"{name}: -0 is left, not +0")

    def train(
        self,
        seed: int,
        micro_batches: int = 1,
        clip: float | None = None,
        dense: bool = False,
        together: bool = False,
    ) -> Both:
        """A step of micro-batches, of which the last one synchronises; compares all in it.

        Args:
            dense: first compare gradients that pruned elements have, too.
            together: run all forwards before the first backward.
        """
        batches = list(zip(*(t.chunk(micro_batches) for t in self.plan.inputs(seed)), strict=True))
        self.model.train()
        if self.kind in ("tp", "fsdp2_tp"):
            clip = None  # torch cannot stack the norms of parameters on different meshes

        def run() -> None:
            losses = []
            for number, (x, y) in enumerate(batches):
                with wrappings.synchronised(self.model, number == len(batches) - 1):
                    out = self.run(self.my_rows(x))
                    expected = self.my_rows(self.oracle.outputs[number])
                    self.close(out, expected, "outputs in training")
                    losses.append(F.mse_loss(out, self.my_rows(y)) / len(batches))
                    if not together:
                        losses.pop().backward()
            for loss in losses:
                loss.backward()

        def act() -> None:
            if dense:
                with prune.dense_gradients(self.model):
                    run()
                    self.compare_gradients(dense=True)
            else:
                run()
            if clip is not None and self.kind.startswith("fsdp1"):
                self.model.clip_grad_norm_(clip)
            elif clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.compare_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for name, indices in self.indices.items():
                expected = wrappings.my_part(self.oracle.value(name), indices)
                self.close(self.held(name), expected, f"{name} after training")
            self.copy_from_oracle()

        return lambda: self.oracle.train(batches, clip), act

    def freeze(self) -> Both:
        """Parameters that need no gradient can be pruned too."""
        return (
            lambda: ignored(self.oracle.dense.requires_grad_(False)),
            lambda: ignored(self.model.requires_grad_(False)),
        )

    def summon(self) -> Both:
        """Inside FSDP1's summon_full_params the stored weights are whole, and may be written."""
        weight = self.oracle.value("l1.weight")
        before = weight.clone()

        def act() -> None:
            with torch.no_grad():
                self.model(self.plan.inputs(0)[0])  # the root keeps a gathered copy
            layer = self.model.module.l1.module
            with FullyShardedDataParallel.summon_full_params(self.model, writeback=True):
                self.close(layer.weight, before, "summoned")
                layer.weight.data.add_(1)
            prune.hold_zeros(self.model)

        return lambda: ignored(weight.add_(1)), act

    def replace_tensors(self, how: str) -> Both:
        """Swap the tensors of the model, by its state dict or otherwise."""
        names = list(self.oracle.masks)

        def expect() -> None:
            if how == "assign other masks":
                self.oracle.dense, self.oracle.masks = self.filled(9), {}
                self.oracle.rank(names, 0.2)
            if how == "float64":
                self.oracle.dense.double()
            self.oracle.new_optimizer()

        def act() -> None:
            # FSDP1 loads through its own module; DDP adds a prefix to the names.
            model = self.model.module if self.kind == "ddp" else self.model
            state = {name: value.clone() for name, value in model.state_dict().items()}
            if how == "assign other masks":
                other = self.plan.wrap(self.filled(9), self.wrapping)
                pairs = prune.select(other, include=names)
                prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.2)
                other = other.module if self.kind == "ddp" else other
                state = copy.deepcopy(other.state_dict())
            if how == "to_empty, meta first":
                model.to("meta")
            if how.startswith("to_empty"):
                model.to_empty(device="cpu")
            if how == "float64":
                model.double()
                self.plan = replace(self.plan, dtype="float64")
            else:
                model.load_state_dict(state, assign=how.startswith("assign"))
            self.take(self.model, self.wrapping)

        return expect, act

    @torch.no_grad()
    def copy_from_oracle(self) -> None:
        for name, indices in self.indices.items():
            self.held(name).copy_(wrappings.my_part(self.oracle.value(name), indices))

    def evaluate(self, seed: int, inference: bool) -> Both:
        def act() -> None:
            self.model.eval()
            # The first forward of a dense FSDP model must not be in inference mode.
            self.compare_outputs(seed, torch.no_grad())
            if inference:
                self.compare_outputs(seed, torch.inference_mode())
            self.model.train()

        return ignored, act

    def set_values(self, data: str, seed: int) -> Both:
        def act() -> None:
            self.reshard()
            if self.kind.startswith("fsdp1"):  # a backward frees what an evaluation has gathered
                self.model(self.my_rows(self.plan.inputs(seed)[0])).sum().backward()
                self.optimizer.zero_grad()
            self.copy_from_oracle()

        return lambda: self.oracle.fill(data, seed), act

    def load_rewrapped(
        self, wrapping: str, pruned: Sequence[str], unmasked: str, seed: int
    ) -> Both:
        """Save, and load into a fresh model that is sharded in another way."""
        dense = [name for name in pruned if name not in self.oracle.masks]

        with_state = all(map(self.can_load_state, (self.wrapping, wrapping)))

        def expect() -> None:
            if with_state:
                self.oracle.start_optimizer()
            if dense and unmasked == "error":
                raise Refused(ValueError)
            if not with_state:
                self.oracle.new_optimizer()
            fresh = self.filled(seed)
            for name in dense:
                (keep,) = reference.prune([fresh.get_parameter(name)], 0.5)
                self.oracle.masks[name] = keep

        def act() -> None:
            path = self.folder / f"{self.plan.seed}-{self.num_saved}"
            self.num_saved += 1
            self.reshard()
            dcp.save(
                checkpoint.get_state_dict(self.model, *self.others(with_state)), checkpoint_id=path
            )
            old = self.model, self.wrapping, self.optimizer, self.pruner
            try:
                self.take(self.plan.wrap(self.filled(seed), wrapping), wrapping)
                if self.pruner is not None and with_state:
                    self.pruner = self.new_pruner()
                for name in pruned:
                    prune.l1_unstructured(*self.target(name), 0.5)
                checkpoint.load(path, self.model, *self.others(with_state), unmasked=unmasked)
            except Exception:
                self.take(*old[:2])
                self.optimizer, self.pruner = old[2:]
                raise
            finally:
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(path, ignore_errors=True)

        return expect, act

    def others(self, with_state: bool) -> tuple[Any, Any]:
        """Return what is saved and loaded with the model."""
        return (self.optimizer, self.pruner) if with_state else ((), None)

    def can_load_state(self, wrapping: str) -> bool:
        """Whether torch can load nested state, of an optimizer or a pruner, beside such a model.

        Not under FSDP1 where a rank has no row of some parameter: DCP takes the checkpoint for one
        of torch 2.3, and misses the key "optimizer.param_groups".
        """
        size = dist.get_world_size()
        lengths = [(*self.oracle.value(name).shape, 1)[0] for name in self.indices]
        every_rank_has_rows = all(-(-length // size) * (size - 1) < length for length in lengths)
        return every_rank_has_rows or not wrapping.startswith("fsdp1")

    def wrap_pruned(self, wrapping: str) -> Both:
        """Wrap a plain model that already has the values and masks of the oracle."""

        def act() -> None:
            model = copy.deepcopy(self.oracle.dense)
            for name, mask in self.oracle.masks.items():
                for module, leaf in places(model, name):
                    prune.custom_from_mask(module, leaf, mask)
            with prune.masks_aside(model):
                model = wrappings.wrap(model, wrapping)
            self.take(model, wrapping)
            # DDP counts the masks of a model that was pruned first among its buffers until its
            # first forward, and fails where they all are removed before it.
            if self.kind == "ddp":
                self.compare_outputs(self.plan.seed, torch.no_grad())

        return self.oracle.new_optimizer, act

    def state_dict(self) -> Both:
        """Get the model's state dict, whole and in parts, and load it."""

        def act() -> None:
            if self.kind.startswith("fsdp1"):
                return  # torch's whole state dicts need an accelerator there
            self.reshard()
            options = StateDictOptions(full_state_dict=True)
            self.compare_whole(get_model_state_dict(self.model, options=options))
            saved = copy.deepcopy(self.model.state_dict())
            with torch.no_grad():
                for value in self.model.state_dict().values():
                    if isinstance(value, Tensor):
                        wrappings.local(value).fill_(1)
            self.model.load_state_dict(saved)

        return ignored, act

    def compare_whole(self, state: dict[str, Tensor]) -> None:
        masks = self.oracle.masks
        for name in self.indices:
            is_renamed = name in masks and not self.is_sharded(name)
            key = name + "_orig" if is_renamed else name
            if not torch.equal(state[key], self.oracle.value(name)):
                self.wrong.append(f"{key} in the whole state dict")
            if name in masks and not torch.equal(state[name + "_mask"].bool(), masks[name]):
                self.wrong.append(f"{name}_mask in the whole state dict")

    def copied(self) -> Both:
        """Go on with a deep copy, if torch can make one."""
        if self.kind != "plain":
            return ignored, ignored
        return (
            self.oracle.new_optimizer,
            lambda: self.take(copy.deepcopy(self.model), self.wrapping),
        )

    def new_optimizer(self) -> Both:
        def act() -> None:
            self.reshard()
            self.optimizer = self.make_optimizer(self.model.parameters())

        return self.oracle.new_optimizer, act


def ignored(*_: Any) -> None:
    """Return None, for an operation that has no report to compare."""
