"""The model card of a result: what was done, above the card of the source.

The card has no date and no path, so that every run writes the same bytes.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from distprune._version import __version__
from distprune.files.disk.access import reading
from distprune.files.planning import CARD_FILE, Plan
from distprune.files.reports import Report
from distprune.files.text import format_percent

# They describe the source; the hub would show them as facts about the result.
_NOT_OF_THE_RESULT = ("model-index", "new_version")
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_BLOCK = re.compile(
    rb"\A(?:\xef\xbb\xbf)?\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE
)


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
    base = cached_name(plan.checkpoint.folder)
    source = b""
    for other in plan.checkpoint.others:
        if other.name == CARD_FILE:
            with reading(other.path):
                source = Path(other.path).read_bytes()
    metadata, below = split_front_matter(source)
    metadata = {key: metadata[key] for key in metadata if key not in _NOT_OF_THE_RESULT}
    if base is not None:  # else the base of the source stays: it is a base of the result, too
        metadata = {**metadata, "base_model": base}
        metadata.pop("base_model_relation", None)
    tags = metadata.get("tags") or []
    if isinstance(tags, list):
        metadata["tags"] = [*tags, *(tag for tag in ("pruned", "sparse") if tag not in tags)]
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    text = f"---\n{head}---\n\n{_section(plan, report, base)}"
    if below.strip():
        text += (
            "\n---\n\n*The card of the source follows as it was. What it says of the quality of "
            "the model was measured before the pruning.*\n\n"
        )
    return text.encode("utf-8") + below.lstrip(b"\r\n")


def _section(plan: Plan, report: Report, base: str | None) -> str:
    percent = format_percent(report.num_pruned, report.num_elements)
    values = plan.inputs.values
    measured = None if values is None else values.facts.get("perplexity")
    quality = "Its quality was not measured."
    if measured is not None:
        before, after = measured["before"], measured["after"]
        quality = f"Its perplexity on held-out text went from {before:.4g} to {after:.4g}."
    scores = "" if plan.inputs.given is None else " --scores SCORES"
    again = f"distprune prune SRC DST -r distprune/recipe.yaml{scores}  # makes it again\n"
    kept = "Every weight that was not pruned, and every other file but this one,"
    if values is not None and values.tensors:  # nothing but the text makes it again
        again = ""
        kept = "The kept weights of pruned matrices were updated. Every other file but this one"
    return f"""# Pruned copy of {base or "a checkpoint"}

distprune {__version__} pruned exactly {report.num_pruned:,} of {report.num_elements:,} selected weights ({percent})
of {f"[{base}](https://huggingface.co/{base})" if base else "the source"}, and nobody has trained it afterwards. {quality}
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
    for path in (Path(folder).absolute(), Path(folder).resolve()):
        for cached, inner in pairwise(path.parts):
            name = cached.removeprefix("models--").replace("--", "/", 1)
            if cached.startswith("models--") and inner == "snapshots" and _ID.fullmatch(name):
                return name
    return None


def split_front_matter(card: bytes) -> tuple[dict[Any, Any], bytes]:
    """The metadata of a card, and the text below: {} and all of it if none can be read."""
    match = _BLOCK.match(card)
    if match is None:
        return {}, card
    try:
        metadata = yaml.safe_load(match[1].decode("utf-8"))
    except Exception:  # PyYAML raises anything for dates, numbers and tags that cannot be
        return {}, card
    if metadata is None or isinstance(metadata, dict):
        return metadata or {}, card[match.end() :]
    return {}, card
