"""Language models in Hugging Face folders: load sharded, calibrate, evaluate, and save.

    from distprune import language_models

    model = language_models.load_sharded("Llama-3-8B", wrap="fsdp2")
    ...  # prune
    language_models.save_sharded(model, "Llama-3-8B-sparse", source="Llama-3-8B")

All functions run on any number of ranks, are called on every rank, and need the extra
``language-models``.
"""

# No module has the name of a function, whose place in this package it would take.
from distprune.language_models.calibrating import (
    TextScores,
    calibrate,
    linear_layers,
    prune_block_by_block,
    prune_in_rounds,
)
from distprune.language_models.folders import load_sharded, load_tokenizer, save_sharded
from distprune.language_models.losses import PerplexityReport, TextPerplexity, perplexity
from distprune.language_models.polishing import polish
from distprune.language_models.shrinking import ShrinkReport, ShrunkLayer, shrink
from distprune.language_models.text import TokenWindows, read_windows
from distprune.language_models.writing import write_text

__all__ = [
    "PerplexityReport", "ShrinkReport", "ShrunkLayer", "TextPerplexity", "TextScores",
    "TokenWindows", "calibrate", "linear_layers", "load_sharded", "load_tokenizer", "perplexity",
    "polish", "prune_block_by_block", "prune_in_rounds", "read_windows", "save_sharded", "shrink",
    "write_text",
]  # fmt: skip
