"""What was done to a checkpoint: a file of JSON beside the masks, and a model card.

The card stands above that of the source. It has no date and no path, so that every run writes the
same bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ValidationError

from distprune._version import __version__
from distprune.base.amount import collapsed, listed
from distprune.files.checkpoint import Checkpoint, TensorEntry, load_json
from distprune.files.disk import REPORT_FILE, reading
from distprune.files.errors import CheckpointError, OutputError, format_percent, translated
from distprune.files.planning import CARD_FILE, Plan
from distprune.files.ranked import RankedGroup
from distprune.ranking.scores import KeyRange
from distprune.recipes import Recipe, make_recipe, problems_of

# They describe the source; the hub would show them as facts about the result.
_NOT_OF_THE_RESULT = ("model-index", "new_version")
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_BLOCK = re.compile(
    rb"\A(?:\xef\xbb\xbf)?\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE
)


# What was counted when tensors were written: by kind and by name of a tensor.
Counts: TypeAlias = defaultdict[str, Counter[str]]


class TensorReport(BaseModel, frozen=True):
    """One pruned tensor.

    Attributes:
        name, dtype, shape, file: as in its header.
        num_elements: how many elements the tensor has.
        num_pruned: elements that were pruned.
        num_zero: elements that were zero in the source.
        crc32: of its kept weights and zeros, if an update has moved the weights.
        group: number of the tensor's group.
        threshold: the largest score that was pruned, of a tensor that was ranked on its own, or
            that a limit held: a magnitude unless the recipe has another score, in units of
            ``divisor`` if that is given.
        held_at: the limit that decided how many were pruned, "min_sparsity" or "max_sparsity";
            None: the ranking decided.
        divisor: what its scores were divided by before they were ranked (their rms, their l2 norm
            or their mean, as the recipe says); None: by nothing. The scores were
            ``fp32(score * fp32(1 / divisor))``, where the inverse has the digits of an fp32 and
            any exponent.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    num_elements: int
    num_pruned: int
    num_zero: int
    crc32: int | None = None
    group: int = 0
    threshold: float | None = None
    held_at: str | None = None
    divisor: float | None = None

    @classmethod
    def of(cls, entry: TensorEntry, counts: Counts, **facts: Any) -> TensorReport:
        """The report of a tensor, from what was counted when it was written."""
        numbers = {f"num_{what}": counts[what][entry.name] for what in ("pruned", "zero")}
        place = {"name": entry.name, "dtype": entry.dtype, "shape": entry.shape, "file": entry.file}
        crc32 = counts["crc32"].get(entry.name)
        return cls(**{**place, "num_elements": entry.numel, "crc32": crc32, **numbers, **facts})


class GroupReport(BaseModel, frozen=True):
    """One group of the recipe; the only one if the recipe has none.

    Attributes:
        num_elements: how many elements its tensors have.
        num_pruned: elements that were pruned, exactly as many as the plan said.
        threshold: the largest score that was pruned by the ranking of the group, if its tensors
            were ranked together by magnitude; None if they were not, or nothing was pruned by it.
            If the group is normalised, it is a multiple of each tensor's ``divisor``.
        num_ties: elements with that score; if the group has limits, only those that no
            limit decided on.
        num_ties_pruned: how many of these ties were pruned.
    """

    num_elements: int
    num_pruned: int
    threshold: float | None = None
    num_ties: int | None = None
    num_ties_pruned: int | None = None


class Report(BaseModel, frozen=True):
    """A finished result of ``prune`` or ``apply``.

    Attributes:
        kind: the command.
        digest: of everything that decides the result.
        recipe: with all defaults; None of ``apply``.
        num_elements: how many elements the selected tensors have.
        num_pruned: elements that were pruned, exactly as many as the plan said.
        groups: those of the recipe, in its order.
        tensors: the pruned ones, group by group, in the order of ranking.
        kept: (name, reason) of the other tensors.
        source: by name of a weight file, its size and the crc32 of its header.
        copied: other files that were copied.
        skipped: (name, reason) of files that were not.
        run: how the result was made, which may differ from run to run: ``num_ranks``; ``seconds``
            by phase, ``peak_rss_bytes`` of each rank, of the run that finished it; ``versions`` of
            torch and numpy.
        warnings: what may be wrong with the result, one or two sentences each.
        inputs: what scores were made from besides weights: ``statistics``, with the sha256 of the
            file, its mode and its number of tokens, or of gradients their weight; ``scores``, with
            sizes, crc32 of headers and times of change; ``update``, what was done to the kept
            weights; ``masks`` of ``apply``.
    """

    status: Literal["complete"] = "complete"
    kind: Literal["prune", "apply"] = "prune"
    digest: str
    recipe: dict[str, Any] | None = None
    num_elements: int
    num_pruned: int
    groups: tuple[GroupReport, ...] = ()
    tensors: tuple[TensorReport, ...]
    kept: tuple[tuple[str, str], ...] = ()
    source: dict[str, dict[str, int]]
    copied: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    run: dict[str, Any]
    warnings: tuple[str, ...] = ()
    inputs: dict[str, Any] = {}

    def to_json(self) -> bytes:
        """The content of report.json; names of files may be no UTF-8, which pydantic refuses."""
        return (json.dumps(self.model_dump(), indent=1) + "\n").encode()


def identity_of(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """What tells one source from another: size and crc32 of the header of each weight file."""
    return {
        file.name: {"size": file.size, "header_crc32": file.header_crc} for file in checkpoint.files
    }


def read_report(folder: str | Path) -> Report:
    """The report of a pruned checkpoint.

    Raises:
        CheckpointError: there is none, or it is malformed.
    """
    path = Path(folder, REPORT_FILE)
    try:
        return Report.model_validate(load_json(path.read_bytes(), str(path)))
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no report ({REPORT_FILE}: {error.strerror}); expected a folder that "
            "`distprune prune` made. `distprune diff` compares any two checkpoints."
        ) from error
    except ValidationError as error:
        first = problems_of(error)[0][:200]
        raise CheckpointError(f"{path} is no report of distprune: {first}") from None


def recipe_of(report: Report, folder: str | Path) -> Recipe:
    """The recipe in the report of a folder; raises CheckpointError if it is invalid."""
    if report.recipe is None:
        raise CheckpointError(
            f"{folder} was made by `distprune apply`: its masks come from another checkpoint. "
            "Verify that checkpoint; `distprune diff` compares the weights of this one with its "
            "source."
        )
    with translated(CheckpointError):
        return make_recipe(report.recipe, f"the recipe in {folder}/{REPORT_FILE}")


def make_report(
    plan: Plan, ranked: Sequence[RankedGroup], counts: Counts, common: Mapping[str, Any]
) -> Report:
    """The report of a pruning.

    Args:
        plan: that was carried out.
        ranked: its groups, and where their rankings were cut.
        counts: what was counted when its tensors were written.
        common: what every report has.

    Raises:
        OutputError: the counts do not add up to what was planned.
    """
    tensors: list[TensorReport] = []
    groups: list[GroupReport] = []
    for each in ranked:
        group, keys, cuts = each.group, each.ranking.keys, each.cuts
        first = len(tensors)
        is_alone = group.recipe.budget is not None or not group.recipe.is_global
        for i, tensor in enumerate(group.tensors):
            facts: dict[str, Any] = {"group": len(groups)}
            if each.divisors is not None:
                facts["divisor"] = each.divisors[i]
            if cuts is not None:
                facts["held_at"] = each.bounds[i]
                if (is_alone or each.bounds[i]) and counts["pruned"][tensor.entry.name]:
                    facts["threshold"] = _score(keys, int(cuts.threshold[i]))
            tensors.append(TensorReport.of(tensor.entry, counts, **facts))
        total = sum(tensor.num_pruned for tensor in tensors[first:])
        if total != group.num_to_prune:
            raise OutputError(
                f"{total} elements were pruned; the plan says {group.num_to_prune}. Unfinished "
                "files were changed during the run. Run the same command with --discard, and then "
                "again without."
            )
        found: dict[str, Any] = {}
        if each.common is not None:
            threshold, num_ties, num_ties_pruned = each.common
            found = {"num_ties": num_ties, "num_ties_pruned": num_ties_pruned}
            found["threshold"] = _score(keys, threshold)
        groups.append(GroupReport(num_elements=group.num_elements, num_pruned=total, **found))
    return Report(
        **common,
        recipe=plan.recipe.as_stored().as_values(),
        num_elements=plan.num_elements,
        num_pruned=plan.num_to_prune,
        groups=tuple(groups),
        tensors=tuple(tensors),
        kept=tuple((entry.name, reason) for entry, _, reason in plan.verdicts if reason),
        warnings=tuple(_warnings(plan, tensors)),
        inputs=plan.inputs(),
    )


def _score(keys: KeyRange, key: int) -> float | None:
    """The score of a key; None if it has none, or JSON cannot hold it (inf)."""
    score = keys.score_of(key) if keys.is_float else math.inf
    return None if math.isinf(score) else score


def _warnings(plan: Plan, tensors: Sequence[TensorReport]) -> list[str]:
    """One or two sentences for each thing that may be wrong with a result."""
    warnings = []
    emptied: list[TensorReport] = []
    for number, group in enumerate(plan.groups):
        if group.recipe.is_global and group.recipe.budget is None:
            members = [tensor for tensor in tensors if tensor.group == number]
            counts = [(tensor.num_elements, tensor.num_pruned) for tensor in members]
            emptied += [members[i] for i in collapsed(counts) if members[i].held_at is None]
    if emptied:
        emptied.sort(key=lambda t: (-t.num_pruned / t.num_elements, t.name))
        names = listed(
            f"{t.name} ({format_percent(t.num_pruned, t.num_elements)} of {t.num_elements:,} "
            "elements)"
            for t in emptied
        )
        warnings.append(
            f"{names} lost at least 99 %, because the scores there are smaller than those of the "
            "other tensors. The model may be useless; max_sparsity (--max-sparsity) bounds what a "
            "single tensor loses, and exclude leaves it alone."
        )
    num_zero = sum(tensor.num_zero for tensor in tensors)
    # Trained weights have hardly any zeros. What the rounds before have pruned is no surprise.
    in_rounds = plan.values is not None and plan.values.facts.get("rounds")
    if 100 * num_zero > plan.num_elements and not in_rounds:
        warnings.append(
            f"the source is sparse already: {num_zero:,} of the {plan.num_elements:,} selected "
            f"elements ({format_percent(num_zero, plan.num_elements)}) are zero in it. The "
            "sparsity that was asked for is the total, and they count towards it."
        )
    return warnings


def card_of(plan: Plan, report: Report) -> bytes:
    """The README.md of a result; the same bytes for every number of ranks.

    Raises:
        CheckpointError: the card of the source cannot be read.

    Cost: one read of the source's card.
    """
    section = _section(plan, report, cached_name(plan.checkpoint.folder))
    return card_above(plan.checkpoint, ("pruned", "sparse"), section)


def card_above(checkpoint: Checkpoint, added_tags: Sequence[str], section: str) -> bytes:
    """A card that stands above that of a checkpoint.

    Args:
        checkpoint: the source.
        added_tags: what the hub lists the result under.
        section: what the result is.

    Raises:
        CheckpointError: the card of the source cannot be read.
    """
    base = cached_name(checkpoint.folder)
    cards = [other.path for other in checkpoint.others if other.name == CARD_FILE]
    with reading(CARD_FILE):
        metadata, below = split_front_matter(Path(cards[0]).read_bytes() if cards else b"")
    metadata = {key: metadata[key] for key in metadata if key not in _NOT_OF_THE_RESULT}
    if base is not None:  # else the base of the source stays: it is a base of the result, too
        metadata = {**metadata, "base_model": base}
        metadata.pop("base_model_relation", None)
    tags = metadata.get("tags") or []
    if isinstance(tags, list):
        metadata["tags"] = [*tags, *(tag for tag in added_tags if tag not in tags)]
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    text = f"---\n{head}---\n\n{section}"
    if below.strip():
        text += (
            "\n---\n\n*The card of the source follows as it was. What it says of the quality of "
            "the model was measured before the pruning.*\n\n"
        )
    return text.encode("utf-8") + below.lstrip(b"\r\n")


def _section(plan: Plan, report: Report, base: str | None) -> str:
    percent = format_percent(report.num_pruned, report.num_elements)
    values = plan.values
    measured = None if values is None else values.facts.get("perplexity")
    quality = "Its quality was not measured."
    if measured is not None:
        before, after = measured["before"], measured["after"]
        quality = f"Its perplexity on held-out text went from {before:.4g} to {after:.4g}."
    scores = "" if plan.given is None else " --scores SCORES"
    again = f"distprune prune SRC DST -r distprune/recipe.yaml{scores}  # makes it again\n"
    kept = "Every weight that was not pruned, and every other file but this one,"
    if values is not None and values.tensors:  # nothing but the text makes it again
        again = ""
        kept = "The kept weights of pruned matrices were updated. Every other file but this one"
    trained = "nobody has trained it afterwards"
    if values is not None and "polish" in values.facts:
        steps = values.facts["polish"]["steps"]
        trained = f"trained it for {steps} steps towards the predictions of its source"
    return f"""# Pruned copy of {base or "a checkpoint"}

distprune {__version__} pruned exactly {report.num_pruned:,} of {report.num_elements:,} selected weights ({percent})
of {f"[{base}](https://huggingface.co/{base})" if base else "the source"}, and {trained}. {quality}
{kept} is that of the source. It loads like its source;
zeros alone make neither files smaller nor dense multiplication faster.

The recipe, with every default (`distprune/recipe.yaml`):

```yaml
{plan.recipe.as_stored().to_yaml().rstrip()}
```

```bash
{again}distprune verify DST --against SRC{scores}  # compares DST with its source
```

`distprune/report.json` has the counts of every tensor.
"""  # noqa: E501


def cached_name(folder: str | Path) -> str | None:
    """The name on the hub of a folder in the hub cache; None for any other folder."""
    for cached, inner in pairwise(Path(folder).resolve().parts):
        name = cached.removeprefix("models--").replace("--", "/", 1)
        if cached.startswith("models--") and inner == "snapshots" and _ID.fullmatch(name):
            return name
    return None


def split_front_matter(card: bytes) -> tuple[dict[Any, Any], bytes]:
    """The metadata of a card, and the text below: {} and all of it if none can be read."""
    match = _BLOCK.match(card)
    if match is not None:
        with contextlib.suppress(Exception):  # PyYAML raises anything for what cannot be
            metadata = yaml.safe_load(match[1].decode("utf-8")) or {}
            if isinstance(metadata, dict):
                return metadata, card[match.end() :]
    return {}, card
