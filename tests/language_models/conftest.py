"""Import transformers once for all ranks."""

import pytest

from distprune.testing import preload

preload(
    "distprune.language_models.folders",
    "transformers.models.llama.modeling_llama",
    "helpers.tiny_language_model",
)


@pytest.fixture(scope="module")
def llama_and_text(tmp_path_factory):
    """A folder with a tiny model, "llama", and "text.txt"."""
    from helpers.tiny_language_model import save_tiny_llama, write_text

    folder = tmp_path_factory.mktemp("llama_and_text")
    save_tiny_llama(folder / "llama")
    write_text(folder / "text.txt", 400)
    return folder
