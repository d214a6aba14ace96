"""A function that makes a config; in torchtitan, of a small Llama."""

from torchtitan.trainer import Trainer


def llama3_debugmodel() -> Trainer.Config:
    return Trainer.Config()
