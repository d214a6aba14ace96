"""Prune and shrink language models that are larger than memory, one decoder layer at a time.

    from distprune import language_models, streaming
    from distprune.recipes import Recipe

    tokenizer = language_models.load_tokenizer("Llama-3-8B")
    windows = language_models.read_windows(tokenizer, ["train.txt"], 2048).sample(32)
    recipe = Recipe(sparsity=0.6, score="fisher")
    streaming.prune_folder("Llama-3-8B", "Llama-3-8B-60", recipe, windows)

The command ``distprune prune SRC DST --text FILE`` does this. It needs the extra
``language-models``, and any number of ranks can share the windows.
"""

from distprune.streaming.pruning import (
    OwnText,
    PrunedFolder,
    StreamCost,
    estimate,
    memory_of_own_text,
    prune_folder,
    room_of,
)
from distprune.streaming.shrinking import ShrinkSizes, shrink_folder, sizes_of_shrunk
from distprune.streaming.windows import perplexity

__all__ = [
    "OwnText", "PrunedFolder", "ShrinkSizes", "StreamCost", "estimate", "memory_of_own_text",
    "perplexity", "prune_folder", "room_of", "shrink_folder", "sizes_of_shrunk",
]  # fmt: skip
