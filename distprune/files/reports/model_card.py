"""The model card of a result: what was done, above the card of the source.

A pruned checkpoint needs a README.md of its own: that of the source describes another model. The
card has no date and no path, so that every run writes the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from distprune._version import __version__
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.disk.access import reading
from distprune.files.planning import CARD_FILE, Plan
from distprune.files.reports import Report, TensorReport
from distprune.files.text import format_percent, role_of
from distprune.recipes import ELEMENTWISE

_TAGS = ("pruned", "sparse")
# They describe the source; the hub would show them as facts about the result.
_NOT_OF_THE_RESULT = ("model-index", "new_version")
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
# First parts of relative paths, which look like names of the hub.
_FOLDERS = ("cache", "checkpoint", "checkpoints", "ckpt", "data", "model", "models", "out",
            "output", "outputs", "results", "runs", "saved", "tmp", "workspace")  # fmt: skip
_MAX_KINDS = 60


def card_of(plan: Plan, report: Report) -> bytes | None:
    """The README.md of a result; the same bytes for every number of ranks.

    Returns:
        The card; None if the recipe turns it off, or the source's ``README.md`` cannot be a card.

    Raises:
        CheckpointError: the card of the source cannot be read.

    Cost: one read of the source's card.
    """
    if not plan.has_card:
        return None
    base_model = name_of_source(plan.checkpoint)
    source = b""
    for other in plan.checkpoint.others:
        if other.name == CARD_FILE:
            with reading(other.path):
                source = Path(other.path).read_bytes()
    metadata, below = split_front_matter(source)
    left_out = list(_NOT_OF_THE_RESULT)
    if base_model is not None:  # else the base of the source stays: it is a base of the result, too
        left_out += ["base_model", "base_model_relation"]
    kept = {key: value for key, value in (metadata or {}).items() if key not in left_out}
    kept |= {} if base_model is None else {"base_model": base_model}
    head = join_front_matter(with_tags(kept, _TAGS))
    text = head + "\n" + "\n".join(_section(plan, report, base_model)) + "\n"
    if below.strip():
        text += (
            "\n---\n\n*The card of the source follows as it was. What it says of the quality of "
            "the model was measured before the pruning.*\n\n"
        )
    return text.encode("utf-8") + below.lstrip(b"\r\n")


def cached_name(folder: str | Path) -> str | None:
    """The name on the hub of a folder in the hub cache; None for any other folder."""
    for path in (Path(folder).absolute(), Path(folder).resolve()):
        for cached, inner in pairwise(path.parts):
            name = cached.removeprefix("models--").replace("--", "/", 1)
            if cached.startswith("models--") and inner == "snapshots" and _ID.fullmatch(name):
                return name
    return None


def name_of_source(checkpoint: Checkpoint) -> str | None:
    """The name of a checkpoint on the hub, from its path in a cache or its config; else None."""
    if name := cached_name(checkpoint.folder):
        return name
    name = checkpoint.config.get("_name_or_path")
    if isinstance(name, str) and "/" in name and _ID.fullmatch(name):
        return None if name.split("/")[0].lower() in _FOLDERS else name
    return None


def _section(plan: Plan, report: Report, base: str | None) -> list[str]:
    percent = format_percent(report.num_pruned, report.num_elements)
    source = f"[{base}](https://huggingface.co/{base})" if base else "its source"
    values = plan.inputs.values
    measured = None if values is None else values.facts.get("perplexity")
    quality = "its quality was not measured."
    if measured is not None:
        quality = (
            f"its perplexity on held-out text went from {measured['before']:.4g} to "
            f"{measured['after']:.4g}."
        )
    scores = scores_are = ""
    if plan.inputs.given is not None:
        scores = " --scores SCORES"
        made = any(part.score in ELEMENTWISE for part in plan.recipe.parts)
        where = ", of `prune --text --keep-scores`" if made else ""
        scores_are = f"`SCORES` are the scores that it was ranked by{where}. "
    commands = [
        f"distprune prune SRC DST -r distprune/recipe.yaml{scores}  # makes it again, to the byte",
        f"distprune verify DST --against SRC{scores}                # compares it with its source",
    ]
    is_same = (
        "Every byte of the weights that was not pruned, and every other file but this one, is "
        "that of the source. "
    )
    if values is not None and values.tensors:  # nothing but the text makes it again
        commands = commands[1:]
        is_same = (
            "The kept weights of pruned matrices were moved so that the outputs of their layers "
            "change least; every other file but this one is that of the source. "
        )
    return [
        f"# Pruned copy of {base or 'a checkpoint'}",
        "",
        f"This checkpoint is {source} with zeros in the place of {report.num_pruned:,} of "
        f"{report.num_elements:,} selected weights ({percent}). It was pruned by "
        f"distprune {__version__}, and not trained afterwards; {quality}",
        "",
        "## What was done",
        "",
        "| | |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in _facts(plan, report)),
        "",
        *_table(report.tensors),
        "",
        "The recipe, which is in `distprune/recipe.yaml` with every default:",
        "",
        "```yaml",
        plan.recipe.as_stored().to_yaml().rstrip(),
        "```",
        "",
        "## To use it, to make it, to check it",
        "",
        "It loads like its source. Zeros make neither the files smaller nor the multiplication of "
        "dense matrices faster: what gains from them is a program or a device that knows sparse "
        "weights, or a compressed format that is made from this one.",
        "",
        "```bash",
        *commands,
        "```",
        "",
        f"`SRC` is a folder with {base or 'the source'}, and `DST` one with this checkpoint. "
        f"{scores_are}{is_same}`distprune/report.json` has the counts of every tensor"
        + (", and `distprune/masks.safetensors` the masks." if plan.recipe.masks else "."),
    ]


def _facts(plan: Plan, report: Report) -> list[tuple[str, str]]:
    recipe = plan.recipe
    scopes = {"global": "all selected tensors together", "layer": "each tensor on its own",
              "row": "each output row on its own"}  # fmt: skip
    if recipe.pattern:
        order = f"{recipe.score_text}, {recipe.pattern} along the inputs"
    elif recipe.sparsity is None:  # several budgets
        order = "as the recipe below says"
    elif recipe.budget is not None:
        order = f"{recipe.score_text}, {scopes['layer']}, with the counts of budget {recipe.budget}"
    else:
        order = f"{recipe.score_text}, {scopes[recipe.scope]}"
    facts = [
        ("pruned", f"exactly {report.num_pruned:,} of {report.num_elements:,} weights, "
         f"{format_percent(report.num_pruned, report.num_elements)}"),
        ("tensors", f"{len(report.tensors):,} pruned, {len(report.kept):,} left as they were"),
        ("ranked by", order),
    ]  # fmt: skip
    statistics = plan.inputs.statistics
    if statistics is not None:
        mode = statistics.mode.replace("_", " ")
        kind, seen = "activations", f"{mode}, {statistics.num_tokens:,} tokens"
        if statistics.weight is not None:
            kind, seen = "gradients", f"weight {statistics.weight:,g}"
        value = f"`distprune/statistics.safetensors`, {seen}, sha256 `{statistics.sha256}`"
        facts.append((f"statistics of {kind}", value))
    if report.threshold is not None:
        only = plan.groups[0].recipe
        ties = f"{report.num_ties_pruned:,} of the {report.num_ties:,} weights that have it"
        is_magnitude = recipe.normalize is None and only.ranks_magnitudes
        what = f"largest {'magnitude' if is_magnitude else 'score'} that was pruned"
        value = f"{report.threshold:.6g}{recipe.by_divisor('times the')}"
        facts.append((what, f"{value} ({ties})"))
    return facts


def _table(tensors: Sequence[TensorReport]) -> list[str]:
    """A table of the sparsity by kind of weight."""
    sums: dict[str, list[int]] = {}
    for tensor in tensors:
        row = sums.setdefault(role_of(tensor.name).kind, [0, 0, 0])
        for i, value in enumerate((1, tensor.num_elements, tensor.num_pruned)):
            row[i] += value
    lines = ["| kind of weight | tensors | elements | pruned | |", "|---|---:|---:|---:|---:|"]
    for kind, (number, elements, pruned) in list(sums.items())[:_MAX_KINDS]:
        percent = format_percent(pruned, elements)
        lines.append(f"| {_code(kind)} | {number:,} | {elements:,} | {pruned:,} | {percent} |")
    if len(sums) > _MAX_KINDS:
        lines.append(f"| and {len(sums) - _MAX_KINDS:,} more | | | | |")
    return lines


def _code(name: str) -> str:
    """A tensor's name as code in a table, without characters that are markup."""
    text = ascii(name)[1:-1].replace("`", "'").replace("|", "\\|")
    return f"`{text if len(text) <= 100 else text[:97] + '...'}`"


_BLOCK = re.compile(
    rb"\A(?:\xef\xbb\xbf)?\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE
)


def split_front_matter(card: bytes) -> tuple[dict[Any, Any] | None, bytes]:
    """The metadata of a card, and the text below.

    Returns:
        None and all of the card if it has no metadata, or none that can be read.
    """
    match = _BLOCK.match(card)
    if match is None:
        return None, card
    try:
        metadata = yaml.safe_load(match[1].decode("utf-8"))
    except Exception:  # PyYAML raises anything for dates, numbers and tags that cannot be
        return None, card
    if metadata is None:
        metadata = {}
    return (metadata, card[match.end() :]) if isinstance(metadata, dict) else (None, card)


def join_front_matter(metadata: dict[Any, Any]) -> str:
    """The metadata as the beginning of a card, in the order of its keys."""
    text = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True) if metadata else ""
    return f"---\n{text}---\n"


def with_tags(metadata: dict[Any, Any], tags: Sequence[str]) -> dict[Any, Any]:
    """The metadata with more tags; tags that are neither a list nor a word are left alone."""
    present = metadata.get("tags") or []
    if isinstance(present, str):
        present = [present]
    if not isinstance(present, list):
        return metadata
    return {**metadata, "tags": [*present, *(tag for tag in tags if tag not in present)]}
