"""What a comparison gives to a single process: weights, scores, outlier ratios."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import distprune as prune
from jobs.processes import Job
from jobs.ranking import Ranking


@dataclass(frozen=True, slots=True)
class ComparisonFiles:
    """Files that rank 0 writes and the single process reads, in one folder.

    Scores are whole tensors named `{criterion}/{parameter}`. Of scores that are computed from
    factors there are the factors, `{criterion}/{parameter}/{term}/{factor}`.
    """

    folder: Path

    def save(
        self,
        trained: dict[str, Tensor],
        rankings: dict[str, Ranking],
        ratios: Mapping[str, float],
        parameters: list[prune.NamedParameter],
        job: Job,
    ) -> None:
        """Collective: scores that are sharded become whole."""
        tensors: dict[str, Tensor] = {}
        for criterion, ranking in rankings.items():
            for pair in parameters if ranking.scores is not None else []:
                tensors |= _as_tensors(f"{criterion}/{pair.fqn}", ranking.scores[pair])
        if job.rank == 0:
            save_file(trained, self._trained)
            save_file(tensors, self._scores)
            methods = {name: ranking.method.__name__ for name, ranking in rankings.items()}
            facts = {"methods": methods, "ratios": dict(ratios)}
            self._facts.write_text(json.dumps(facts, indent=2))

    def load_trained(self) -> dict[str, Tensor]:
        return load_file(self._trained)

    def load_ranking(self, criterion: str, parameters: list[prune.NamedParameter]) -> Ranking:
        """What `save` was given for one criterion, for a plain model."""
        method = getattr(prune, json.loads(self._facts.read_text())["methods"][criterion])
        with safe_open(self._scores, framework="pt") as file:
            names = list(file.keys())
            keys = [key for key in names if key.startswith(f"{criterion}/")]
            tensors = {key: file.get_tensor(key) for key in keys}
        if not tensors:
            return Ranking(method)
        return Ranking(
            method, {pair: _from_tensors(f"{criterion}/{pair.fqn}", tensors) for pair in parameters}
        )

    def load_ratios(self) -> dict[str, float]:
        return json.loads(self._facts.read_text())["ratios"]

    @property
    def _trained(self) -> Path:
        return self.folder / "trained.safetensors"

    @property
    def _scores(self) -> Path:
        return self.folder / "scores.safetensors"

    @property
    def _facts(self) -> Path:
        return self.folder / "scores.json"


def _as_tensors(name: str, scores: Tensor | prune.FactoredScores) -> dict[str, Tensor]:
    if isinstance(scores, prune.FactoredScores):
        return {
            f"{name}/{i}/{j}": factor.cpu().contiguous()
            for i, term in enumerate(scores.terms)
            for j, factor in enumerate(term)
        }
    whole = scores.full_tensor() if isinstance(scores, DTensor) else scores
    return {name: whole.cpu().contiguous()}


def _from_tensors(name: str, tensors: dict[str, Tensor]) -> Tensor | prune.FactoredScores:
    if name in tensors:
        return tensors[name]
    terms: dict[int, dict[int, Tensor]] = {}
    for key in tensors:
        if key.startswith(f"{name}/"):
            term, factor = map(int, key.split("/")[-2:])
            terms.setdefault(term, {})[factor] = tensors[key]
    return prune.FactoredScores([[t[j] for j in sorted(t)] for _, t in sorted(terms.items())])
