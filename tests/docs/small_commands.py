"""Commands of the documentation made small, and the files that they read."""

import contextlib
import shutil

from distprune.cli import main
from distprune.recipes import shipped_recipes
from helpers.tiny_language_model import save_tiny_llama, save_tiny_mixtral, write_text

MODELS = (
    "llama", "llama-instruct", "Llama-3-8B", "Llama-3.2-1B", "Llama-3.2-1B-Instruct",
    "Llama-3-70B", "Qwen3-0.6B", "MODEL", "SRC", "A", "B", "my-model", "my_scores",
)  # fmt: skip
PRUNED = (
    "llama-50", "Llama-3-8B-50", "Llama-3.2-1B-50", "Llama-3.2-1B-50-tuned", "Llama-3.2-1B-2of4",
    "masks-of-my-run",
)  # fmt: skip
TEXTS = ("train.txt", "held-out.txt", "test.txt", "a.txt", "b.txt")
SMALL = {"--samples": "4", "--limit": "4"}  # the values of these options
LENGTH = "32"


def write_sources(folder):
    """All that commands read, and results of some."""
    save_tiny_llama(folder / MODELS[0])
    for name in MODELS[1:]:
        shutil.copytree(folder / MODELS[0], folder / name)
    save_tiny_mixtral(folder / "Qwen3-30B-A3B")
    for name in TEXTS:
        write_text(folder / name, 200)
    shutil.copy(shipped_recipes()["layer_50"], folder / "recipe.yaml")
    made = [["prune", "llama", PRUNED[0], "--sparsity", "0.5", "-q"]]
    made += [["calibrate", "llama", "--text", "a.txt", "--out", "stats.safetensors", "-q"]]
    with contextlib.chdir(folder):
        for arguments in made:
            assert exit_code_of(made_small(arguments)) == 0, arguments
    for name in PRUNED[1:]:
        shutil.copytree(folder / PRUNED[0], folder / name)


def exit_code_of(arguments):
    """Run a command of distprune in this process."""
    try:
        main(arguments)
    except SystemExit as end:
        return end.code


def made_small(arguments):
    """Arguments of a small run on one process; what it would write is removed."""
    arguments = [
        SMALL.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    if arguments[0] in ("eval", "calibrate", "write-text", "shrink") or "--text" in arguments:
        arguments += ["--length", LENGTH]  # the last one counts
    has_text = "--text" in arguments and arguments[0] in ("prune", "plan")
    if has_text or arguments[0] in ("write-text", "shrink"):
        arguments += ["--windows", "4"]
    if arguments[0] == "shrink":
        arguments += ["--round-to", "4"]
    if arguments[0] in ("prune", "apply", "shrink"):
        named = [word for word in arguments[1:] if not word.startswith("-")]
        destination = named[2 if arguments[0] == "apply" else 1]
        shutil.rmtree(destination, ignore_errors=True)  # of an alternative
    return arguments
