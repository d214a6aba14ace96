"""What plain transformers loads: `python -m tiny_llama.saved_model FOLDER FINDINGS WINDOWS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from .data import load_corpus
from .training import mean_loss


def main(model_folder: Path, findings_file: Path, num_held_out_windows: int) -> None:
    """Count each parameter's zeros and measure the held-out loss, with no help from distprune."""
    disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(model_folder)
    if "distprune" in sys.modules:
        raise RuntimeError("distprune is imported; expected to load the model as a stranger would.")
    num_zeros = {name: int((value == 0).sum()) for name, value in model.named_parameters()}
    loss = float(mean_loss(model, load_corpus(num_held_out_windows).held_out))
    findings = {"num_zeros": num_zeros, "held_out_loss": loss}
    findings_file.write_text(json.dumps(findings, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
