"""Import transformers once for all ranks."""

from distprune.testing import preload

preload(
    "distprune.language_models.loading",
    "transformers.models.llama.modeling_llama",
    "helpers.tiny_language_model",
)
