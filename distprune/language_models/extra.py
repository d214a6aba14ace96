"""The packages of the extra ``language-models``."""

from __future__ import annotations

import importlib.util

_PACKAGES = ("transformers", "safetensors")


def require_extra() -> None:
    """Raise ImportError, which names the extra, if a package of it is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"distprune.language_models needs {' and '.join(missing)}; expected the extra "
            "language-models. Install it: pip install 'distprune[language-models]'"
        )
