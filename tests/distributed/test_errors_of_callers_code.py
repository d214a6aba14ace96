"""The caller's code raises on one rank, between two collectives: every rank raises, at once.

The process group waits five minutes for a rank, and a test one: a rank that is left alone fails it.
"""

import gc
import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distprune as prune
from distprune.criteria import SNIP, Fisher
from distprune.files.team import Team
from distprune.integrations.channels import ChannelPart
from distprune.language_models import TokenWindows, calibrate, perplexity
from distprune.ranks.collectives import world
from distprune.schedule import OneShot, ScheduledPruner
from distprune.statistics import ActivationStatistics, prune_sequentially
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.micro_batches import loss_of, make_model, micro_batch
from helpers.models import fqns, target

TIMEOUT = 60.0


class Broken(Exception):
    """The error of the caller's code; no type that other ranks have."""


class Case:
    """A model on this rank, and code of the caller that raises on rank 1."""

    def __init__(self, wrapping: str) -> None:
        dense = make_model(wrapping, "float32")
        self.batch = micro_batch(dense, "float32", dist.get_rank(), 0)
        self.model = wrappings.wrap(make_model(wrapping, "float32"), wrapping)
        self.pairs = [target(wrappings.unwrapped(self.model), name) for name in fqns(dense)]
        self.weights = [pair for pair in self.pairs if pair[1] == "weight"]

    def fail(self) -> None:
        if dist.get_rank() == 1:
            raise Broken("the disk is gone")

    def loader(self):
        """Two batches, and an error after the last one."""
        yield self.batch
        yield self.batch
        self.fail()

    def broken(self, items):
        """An iterable with an error at its end."""
        yield from items
        self.fail()

    def backward(self, batch) -> None:
        loss_of(self.model, batch).backward()

    def forward(self, batch) -> None:
        self.model(batch[0])

    def prune(self, parameters=None, **arguments):
        parameters = self.weights if parameters is None else parameters
        return prune.global_unstructured(parameters, prune.L1Unstructured, amount=0.25, **arguments)


def batches_of_fisher(case: Case, unit: str) -> None:
    criterion = Fisher(case.pairs, unit=unit)
    with criterion.calibrating():
        for batch in case.loader():
            with criterion.batch():
                case.backward(batch)
    criterion.scores()


def skipping_criterion(case: Case) -> None:
    """The others wait in update, which compares gradients over the ranks."""
    criterion = SNIP(case.pairs, non_finite="skip")
    with criterion.calibrating(), criterion.batch():
        case.backward(case.batch)
        case.fail()


def collected_inputs(case: Case) -> None:
    statistics = ActivationStatistics(case.weights)
    with statistics.collecting():
        for batch in case.loader():
            case.forward(batch)
    statistics.wanda()


def several_contexts(case: Case) -> None:
    """The first exit of the failing rank meets another collective than its own."""
    criterion = Fisher(case.pairs, unit="rank_batch")
    first, second = ActivationStatistics(case.weights[:1]), ActivationStatistics(case.weights)
    with first.collecting(), second.collecting():
        for batch in case.loader():
            case.forward(batch)
        with criterion.calibrating(), torch.enable_grad():
            case.fail()
    first.totals()
    second.totals()


def in_sequence(case: Case, prune_block, batches=None) -> None:
    statistics = ActivationStatistics(case.weights)
    prune_sequentially(
        statistics,
        case.model,
        [module for module, _ in case.weights],
        [case.batch] if batches is None else batches,
        partial(prune_block, statistics),
        run=lambda number, batch: case.forward(batch),
    )


class Batches:
    """A data set whose iteration fails at its end, in the second block."""

    def __init__(self, case: Case) -> None:
        self.case, self.num_runs = case, 0

    def __iter__(self):
        self.num_runs += 1
        return self.case.loader() if self.num_runs == 2 else iter([self.case.batch])


def loader_of_blocks(case: Case) -> None:
    def prune_block(statistics, parameters) -> None:
        case.prune(parameters, importance_scores=statistics.wanda(parameters))

    in_sequence(case, prune_block, Batches(case))


def after_a_block(case: Case) -> None:
    """After the last collective of the last block."""

    def prune_block(statistics, parameters) -> None:
        case.prune(parameters)
        if parameters[0][0] is case.weights[-1][0]:
            case.fail()

    in_sequence(case, prune_block)


def body_of_masks_aside(case: Case) -> None:
    case.prune()
    with prune.masks_aside(case.model):
        case.fail()


def scores_of_a_schedule(case: Case) -> None:
    pruner = ScheduledPruner(
        case.weights, OneShot(0, 0.5), importance_scores=lambda: case.fail() or {}
    )
    pruner.step()


ITERABLES = {  # that fail at their end, and what is called with them
    "global_structured": lambda case: prune.global_structured(
        {"a": case.broken([ChannelPart(pair, dim=0) for pair in case.weights])}, amount=0.5
    ),
    "global_unstructured": lambda case: case.prune(case.broken(case.weights)),
    "ActivationStatistics": lambda case: ActivationStatistics(case.broken(case.weights)),
    "allow_empty": lambda case: ActivationStatistics(case.weights, allow_empty=case.broken(["*"])),
    "prepare_for_load": lambda case: prune.checkpoint.prepare_for_load(
        case.model, case.broken(["l1.weight_mask"])
    ),
}


class Language(nn.Module):
    """The smallest language model."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, input_ids):
        return self.head(self.table(input_ids))


def windows() -> TokenWindows:
    tokens = torch.arange(12).view(3, 4) % 8
    return TokenWindows(("text",), tokens, torch.zeros(3, dtype=torch.int64), False)


def progress(case: Case, function: str, failing: int) -> None:
    """After a step in the middle, or the last one, in which rank 1 has no batch."""

    def progress(run) -> None:
        if run.num_done == failing:
            case.fail()

    torch.manual_seed(0)
    model = Language()
    if function == "calibrate":
        statistics = ActivationStatistics([(model.head, "weight")])
        calibrate(model, windows(), statistics, progress=progress)
    else:
        perplexity(model, windows(), progress=progress)


def progress_of_files(case: Case) -> None:
    """After the last round, too."""
    team = Team(world(), lambda _: case.fail())
    team.begin("count", 2)
    team.run(lambda: team.count("count", 1))


CASES = {
    "Fisher.calibrating, rank_batch": (
        partial(batches_of_fisher, unit="rank_batch"), ["plain-2", "ddp-2", "fsdp2-2"]
    ),
    "Fisher.calibrating, global_batch": (
        partial(batches_of_fisher, unit="global_batch"), ["ddp-2", "fsdp2-2"]
    ),
    "SNIP, non_finite": (skipping_criterion, ["ddp-2"]),
    "collecting": (collected_inputs, ["plain-2", "ddp-2", "fsdp1-2", "fsdp2-2"]),
    "several contexts": (several_contexts, ["plain-2"]),
    "prune_sequentially, loader": (loader_of_blocks, ["plain-2", "fsdp2-2"]),
    "prune_sequentially, after": (after_a_block, ["plain-2", "fsdp2-2"]),
    "masks_aside": (body_of_masks_aside, ["plain-2"]),
    "ScheduledPruner": (scores_of_a_schedule, ["plain-2"]),
    **{name: (call, ["plain-2"]) for name, call in ITERABLES.items()},
    **{
        f"{function}, step {step}": (
            partial(progress, function=function, failing=step), ["plain-2"],
        )
        for function in ("calibrate", "perplexity")
        for step in (2, 3)
    },
    "prune_checkpoint, progress": (progress_of_files, ["plain-2"]),
}  # fmt: skip


def outcome(name: str, wrapping: str) -> tuple[str, str, int]:
    """(type and text of the error, elements that a pruning afterwards prunes)."""
    case = Case(wrapping)
    kind = text = ""
    try:
        CASES[name][0](case)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    gc.collect()  # a graph, in frames of the traceback
    case.model.zero_grad()
    done = case.prune()  # the ranks are in step, and no call is under way
    return kind, text, sum(each.num_pruned for each in done.parameters)


def outcomes(wrapping: str, names: list[str]) -> list[tuple]:
    return [outcome(name, wrapping) for name in names]


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "fsdp1-2", "fsdp2-2"])
def test_every_rank_raises(wrapping):
    names = [name for name, (_, wrapped) in CASES.items() if wrapping in wrapped]
    per_rank = run_ranks(outcomes, 2, wrapping, names, timeout=TIMEOUT)
    for name, healthy, broken in zip(names, *per_rank, strict=True):
        kind = "FilesError" if name.startswith("prune_checkpoint") else "RuntimeError"
        assert healthy[:2] == (kind, "on rank 1: Broken: the disk is gone"), name
        # In a context or a callback it is the error itself; in a local step all have the same.
        assert broken[:2] in (("Broken", "the disk is gone"), healthy[:2]), name
        assert healthy[2] == broken[2] > 0, name


def each_its_own(case: Case) -> None:
    """Every rank raises, in contexts that are inside of each other."""
    statistics = ActivationStatistics(case.weights)
    with Fisher(case.pairs, unit="rank_batch").calibrating(), statistics.collecting():
        raise Broken(f"of rank {dist.get_rank()}")


def refused_call(case: Case) -> None:
    """A call inside is refused on all ranks: the contexts around it have nothing to tell."""
    statistics = ActivationStatistics(case.weights)
    with Fisher(case.pairs, unit="rank_batch").calibrating(), statistics.collecting():
        prune.global_unstructured(case.weights, prune.L1Unstructured, amount=dist.get_rank())


def interrupted(case: Case) -> None:
    """Rank 1 is about to end; rank 0 calls nothing."""
    statistics = ActivationStatistics(case.weights)
    if dist.get_rank() == 1:
        with statistics.collecting():
            raise KeyboardInterrupt


def errors_and_warnings(name: str) -> tuple[str, str, list[str], int]:
    case = Case("plain-2")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("distprune")
    logger.addHandler(handler)
    logger.propagate = False
    kind = text = ""
    try:
        globals()[name](case)
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    done = case.prune()
    return kind, text, warnings, sum(each.num_pruned for each in done.parameters)


def test_what_ranks_say_of_errors_of_their_own():
    """By function: the (type, part of the text) of each rank, and its warnings."""
    expected = {
        # Once, though there are two contexts.
        "each_its_own": [
            ("Broken", f"of rank {rank}", [f"rank {rank} has raised Broken"]) for rank in (0, 1)
        ],
        # All ranks know this error: nobody is told of it.
        "refused_call": [("ValueError", "different arguments", [])] * 2,
        # An interrupt waits for nobody.
        "interrupted": [("", "", []), ("KeyboardInterrupt", "", [])],
        "collected_inputs": [
            ("RuntimeError", "on rank 1", []),
            ("Broken", "", ["rank 1 has raised Broken, and waits for the other ranks"]),
        ],
    }
    for name, per_rank in expected.items():
        found = run_ranks(errors_and_warnings, 2, name, timeout=TIMEOUT)
        for (kind, text, warnings, num), wanted in zip(found, per_rank, strict=True):
            assert kind == wanted[0] and wanted[1] in text and num, (name, kind, text)
            assert len(warnings) == len(wanted[2]), (name, warnings)
            assert all(map(str.__contains__, warnings, wanted[2])), (name, warnings)
