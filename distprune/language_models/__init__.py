"""Language models in Hugging Face folders: load sharded, calibrate, evaluate, and save.

    from distprune import language_models

    model = language_models.load_sharded("Llama-3-8B", wrap="fsdp2")
    ...  # prune
    language_models.save_sharded(model, "Llama-3-8B-sparse", source="Llama-3-8B")

All functions run on any number of ranks, are called on every rank, and need the extra
``language-models``. Names are imported when they are first used.
"""

from __future__ import annotations

import importlib

# Type checkers take this name for true; see distprune/__init__.py.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from distprune.language_models.calibrating import calibrate as calibrate
    from distprune.language_models.evaluating import PerplexityReport as PerplexityReport
    from distprune.language_models.evaluating import TextPerplexity as TextPerplexity
    from distprune.language_models.evaluating import perplexity as perplexity
    from distprune.language_models.layers import linear_layers as linear_layers
    from distprune.language_models.layers import load_tokenizer as load_tokenizer
    from distprune.language_models.loading import load_sharded as load_sharded
    from distprune.language_models.losses import BatchLosses as BatchLosses
    from distprune.language_models.memory import MemoryEstimate as MemoryEstimate
    from distprune.language_models.memory import estimate_memory as estimate_memory
    from distprune.language_models.running import DataRanks as DataRanks
    from distprune.language_models.running import RunProgress as RunProgress
    from distprune.language_models.running import data_ranks as data_ranks
    from distprune.language_models.saving import SavedModel as SavedModel
    from distprune.language_models.saving import save_sharded as save_sharded
    from distprune.language_models.sequential import decoder_blocks as decoder_blocks
    from distprune.language_models.sequential import prune_block_by_block as prune_block_by_block
    from distprune.language_models.text import TokenWindows as TokenWindows
    from distprune.language_models.text import read_windows as read_windows

# By public name, its module. No module has the name of a function: once imported, it would take
# the function's place in this package.
_MODULES = {
    "BatchLosses": "losses",
    "MemoryEstimate": "memory",
    "PerplexityReport": "evaluating",
    "DataRanks": "running",
    "RunProgress": "running",
    "SavedModel": "saving",
    "TextPerplexity": "evaluating",
    "TokenWindows": "text",
    "calibrate": "calibrating",
    "estimate_memory": "memory",
    "linear_layers": "layers",
    "load_sharded": "loading",
    "load_tokenizer": "layers",
    "perplexity": "evaluating",
    "data_ranks": "running",
    "decoder_blocks": "sequential",
    "prune_block_by_block": "sequential",
    "read_windows": "text",
    "save_sharded": "saving",
}

__all__ = [
    "BatchLosses",
    "DataRanks",
    "MemoryEstimate",
    "PerplexityReport",
    "RunProgress",
    "SavedModel",
    "TextPerplexity",
    "TokenWindows",
    "calibrate",
    "data_ranks",
    "decoder_blocks",
    "estimate_memory",
    "linear_layers",
    "load_sharded",
    "load_tokenizer",
    "perplexity",
    "prune_block_by_block",
    "read_windows",
    "save_sharded",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
