"""The JSON schema of recipes: for editors; ``distprune.recipe`` is what checks."""

from __future__ import annotations

from typing import Any

_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_STEP = {"type": "integer", "minimum": 0}
_PATTERNS = {
    "description": "Globs, or regular expressions after 're:', for whole names.",
    "oneOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ],
}


def _table(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


_RAMP = {
    "begin": _STEP,
    "end": _STEP,
    "frequency": {"type": "integer", "minimum": 1},
    "initial_sparsity": _SHARE,
    "final_sparsity": _SHARE,
}
_SCORE = {
    "enum": ["magnitude", "random"],
    "default": "magnitude",
    "description": "What ranks the weights.",
}
_RANKING = {
    "scope": {
        "enum": ["global", "layer", "row"],
        "default": "global",
        "description": "What is ranked together: everything, a tensor, or a row.",
    },
    "pattern": {
        "type": "string",
        "pattern": "^[0-9]+:[0-9]+$",
        "description": "N:M, instead of sparsity: N of every M in a row are kept.",
    },
}
_GROUP = {
    "score": _SCORE,
    "method": {**_SCORE, "description": "The same as score."},
    "sparsity": {**_SHARE, "description": "The share of the selected weights to prune, at once."},
    "schedule": {
        "description": "The same over the steps of a training run, instead of sparsity.",
        "oneOf": [
            _table(
                {"kind": {"const": "one_shot"}, "step": _STEP, "sparsity": _SHARE},
                required=["kind", "sparsity"],
            ),
            _table(
                {"kind": {"enum": ["linear", "cubic"]}, **_RAMP},
                required=["kind", "end", "frequency", "final_sparsity"],
            ),
        ],
    },
    "select": _table(
        {
            "include": _PATTERNS,
            "also": {**_PATTERNS, "description": "Besides the default; for checkpoints."},
            "exclude": _PATTERNS,
            "names": {**_PATTERNS, "description": "Names of parameters; for training."},
            "min_ndim": {"type": "integer", "minimum": 1, "description": "For checkpoints."},
            "input_dims": {
                "type": "object",
                "additionalProperties": {
                    "oneOf": [
                        {"type": "integer"},
                        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    ]
                },
                "description": "By pattern, the dimension of the inputs; for checkpoints.",
            },
        },
        description="Which weights.",
    ),
    "limits": _table(
        {"min_sparsity": _SHARE, "max_sparsity": _SHARE},
        description="Of every single parameter, in scope global; the total stays exact.",
    ),
}


def recipe_schema() -> dict[str, Any]:
    """The schema, as plain values."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of distprune",
        **_table(
            {
                "version": {"const": 1},
                "seed": {**_STEP, "description": "Of the score random."},
                **_RANKING,
                "nan": {
                    "enum": ["error", "keep"],
                    "default": "error",
                    "description": "What a NaN among the weights of a checkpoint is.",
                },
                "output": _table(
                    {
                        "masks": {"type": "boolean", "default": True},
                        "card": {"type": "boolean", "default": True},
                    },
                    description="What is written beside a pruned checkpoint: masks, and README.md "
                    "with what was done.",
                ),
                **_GROUP,
                "groups": {
                    "type": "array",
                    "minItems": 1,
                    "items": _table({**_GROUP, **_RANKING}, required=["select"]),
                    "description": "Parts of a model with budgets of their own; each has what "
                    "differs from the top level.",
                },
            },
            required=["version"],
        ),
    }
