"""Import transformers once for all ranks."""

from distprune.testing import preload

preload(
    "distprune.streaming", "transformers.models.llama.modeling_llama", "helpers.tiny_language_model"
)
