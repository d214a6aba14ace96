"""Frozen results of checkpoints on disk: each architecture, each request."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distprune.files.checkpoint import TensorEntry
from distprune.files.planning import plan
from distprune.files.pruning import prune
from distprune.files.statistics_file import StoredStatistics, WeightLayout, write_statistics
from distprune.recipes import Recipe
from distprune.testing import run_ranks
from golden import corpus
from helpers.architecture_checkpoints import ARCHITECTURES, Architecture
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import DTYPES, load, save

BY_NAME = {each.name: each for each in ARCHITECTURES}
NUM_RANKS = (1, 3)
BOUNDS = {"min_sparsity": 0.3, "max_sparsity": 0.6}
# Keys of recipes. "groups", "statistics" and "scores" are filled in by recipe_of.
REQUESTS: dict[str, dict[str, Any]] = {
    "global": {"sparsity": 0.5},
    "rms": {"sparsity": 0.5, "normalize": "rms"},
    "l2": {"sparsity": 0.4, "normalize": "l2"},
    "mean": {"sparsity": 0.6, "normalize": "mean"},
    "layer": {"sparsity": 0.37, "scope": "layer"},
    "row": {"sparsity": 0.25, "scope": "row"},
    "2:4": {"pattern": "2:4"},
    "bounds": {"sparsity": 0.5, **BOUNDS},
    "bounds rms": {"sparsity": 0.45, "normalize": "rms", **BOUNDS},
    "random": {"sparsity": 0.61, "score": "random", "seed": 5},
    "random row": {"sparsity": 0.5, "score": "random", "seed": 6, "scope": "row"},
    "given": {"sparsity": 0.5, "score": "given"},
    "given rms bounds": {"sparsity": 0.5, "score": "given", "normalize": "rms", **BOUNDS},
    "groups": {
        "groups": [
            {"sparsity": 0.3},
            {"sparsity": 0.5, "scope": "row"},
            {"sparsity": 0.7, "normalize": "rms", "max_sparsity": 0.75},
        ]
    },
    "wanda": {"sparsity": 0.5, "score": "wanda"},
    "wanda rms": {"sparsity": 0.5, "score": "wanda", "normalize": "rms"},
    "wanda 2:4": {"pattern": "2:4", "score": "wanda"},
    "stade row": {"sparsity": 0.6, "score": "stade", "scope": "row"},
    "stade bounds": {"sparsity": 0.5, "score": "stade", **BOUNDS},
}
WITH_STATISTICS = ("llama_tied_with_duplicates", "mistral_with_adapter", "qwen2", "qwen3_moe",
                   "gpt2", "bert_classifier")  # fmt: skip


def requests_of(name: str) -> list[str]:
    """Return the requests that are made of an architecture."""
    return [
        request
        for request, arguments in REQUESTS.items()
        if arguments.get("score") not in ("wanda", "stade") or name in WITH_STATISTICS
    ]


def case_name(architecture: str, request: str) -> str:
    return f"checkpoint/{architecture}/{request}"


ALL_CASES = [case_name(name, request) for name in BY_NAME for request in requests_of(name)]


class Source:
    """A checkpoint, with statistics and scores for it."""

    def __init__(self, architecture: Architecture, folder: Path) -> None:
        self.architecture = architecture
        self.folder = architecture.make(folder / architecture.name)
        tensors = [tensor.entry for tensor in plan(self.folder, raw_recipe(0.5)).tensors]
        self.names = [tensor.name for tensor in tensors]
        generator = torch.Generator().manual_seed(7)
        scores = {}
        for number, tensor in enumerate(tensors):
            drawn = torch.randint(-9, 10, tensor.shape, generator=generator) * (1 + number % 3)
            scores[tensor.name] = drawn.bfloat16()
            scale(self.folder / tensor.file, tensor, 2.0 ** (number % 3 - 1))
        self.scores = str(save(folder / "scores", scores))
        self.statistics = str(folder / "statistics.safetensors")
        if architecture.name in WITH_STATISTICS:
            statistics = {each.name: self._statistics(each.name, each.shape) for each in tensors}
            write_statistics(self.statistics, "one_pass", statistics)

    def _statistics(self, name: str, shape: tuple[int, ...]) -> StoredStatistics:
        """Sums of whole numbers, which differ from input to input."""
        is_turned = self.architecture.stores_input_first(name)
        layout = "conv1d_of_transformers" if is_turned else "linear"
        num_inputs = shape[0 if is_turned else 1]
        sums = (np.arange(num_inputs) * 37 + len(name)) % 101 - 50.0
        squares = (np.arange(num_inputs) * 53 + len(name)) % 211 + 10.0
        return StoredStatistics(WeightLayout(layout, tuple(shape)), 300, sums, squares)

    def recipe_of(self, request: str) -> Recipe:
        arguments = dict(REQUESTS[request])
        if "pattern" in arguments:
            arguments["exclude"] = self.architecture.not_by_four
        if arguments.get("score") == "given":
            arguments["scores"] = self.scores
        if arguments.get("score") in ("wanda", "stade"):
            arguments["statistics"] = self.statistics
        if "groups" in arguments:
            arguments["groups"] = [
                {**group, "include": tuple(self.names[number::3])}
                for number, group in enumerate(arguments["groups"])
            ]
        return raw_recipe(**arguments)

    def digest(self) -> str:
        return corpus.hash_of_tensors(all_tensors(self.folder))


def scale(path: Path, tensor: TensorEntry, factor: float) -> None:
    """Multiply a tensor of a file, so that tensors differ in size, as those of real models do."""
    with path.open("r+b") as file:
        file.seek(tensor.start)
        values = torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=DTYPES[tensor.dtype])
        file.seek(tensor.start)
        file.write((values * factor).view(torch.uint8).numpy().tobytes())


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor below a folder, but for what a pruning adds."""
    return {
        f"{path.relative_to(folder)}/{name}": tensor
        for path in [folder, *(each for each in folder.rglob("*") if each.is_dir())]
        if path.name != "distprune"
        for name, tensor in load(path).items()
    }


def prune_here(source: Path, recipes: dict[str, Recipe], target: Path) -> list[str]:
    """Carry out each request on this rank; return the hash of each report."""
    facts = []
    for request, recipe in recipes.items():
        report = prune(plan(source, recipe), target / request)
        parts = []
        for group in report.groups:
            parts += [group.num_pruned, group.threshold, group.num_ties, group.num_ties_pruned]
        for each in report.tensors:
            parts += [each.name, each.num_pruned, each.num_zero, each.threshold, each.held_at]
            parts += [each.divisor]
        facts.append(corpus.hash_of(parts))
    return facts


def mask_tensors(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return the masks beside a result, in the shapes of their tensors."""
    stored, masks = load(folder / "distprune"), {}
    for name, tensor in load(source).items():
        if name in stored:
            bits = np.unpackbits(stored[name].numpy(), bitorder="little")[: tensor.numel()]
            masks[name] = torch.from_numpy(bits).reshape(tensor.shape)
    return masks


def results(name: str, requests: Sequence[str], num_ranks: int) -> tuple[str, dict[str, str]]:
    """Return (hash of the checkpoint, hashes by case) of an architecture."""
    with tempfile.TemporaryDirectory() as folder:
        source = Source(BY_NAME[name], Path(folder))
        recipes = {request: source.recipe_of(request) for request in requests}
        target = Path(folder, "results")
        target.mkdir()
        if num_ranks == 1:
            per_rank = [prune_here(source.folder, recipes, target)]
        else:
            per_rank = run_ranks(prune_here, num_ranks, source.folder, recipes, target)
        assert all(facts == per_rank[0] for facts in per_rank), "reports differ between ranks"
        found = {}
        for request, facts in zip(requests, per_rank[0], strict=True):
            masks = corpus.hash_of_masks(mask_tensors(source.folder, target / request))
            weights = corpus.hash_of_tensors(all_tensors(target / request))
            found[case_name(name, request)] = f"masks={masks} weights={weights} report={facts}"
        return source.digest(), found
