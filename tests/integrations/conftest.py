"""Import transformers and PEFT once for all ranks."""

from distprune.testing import preload

preload("transformers.trainer", "transformers.models.llama.modeling_llama", "peft")
