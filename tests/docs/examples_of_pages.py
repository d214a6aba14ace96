"""The code blocks of README.md and of docs/, and the names that they may use without making them.

A block is run in the namespace of its page, after the blocks above it. Comments of HTML, right
above a block, say how:

    <!-- example: ranks=2 -->          on two gloo ranks, where the model is sharded by FSDP2
    <!-- example: file=test_x.py -->   a test file, which pytest runs
    <!-- example: skip: REASON -->     not at all
    <!-- examples: ranks=2 -->         at the top of a page: for every block of it
"""

import contextlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(
    r"(?:^<!-- example: (?P<how>.*?) -->\n)?^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_WHOLE_PAGE = re.compile(r"^<!-- examples: (.*?) -->$", re.MULTILINE)
_INCLUDED = re.compile(r'^--8<-- "(.*)"$', re.MULTILINE)
LANGUAGE_MODELS = ("Llama-3.2-1B-50", "Llama-3-8B")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: relative to the repository.
        line: of the first line of code, from 1.
        language: after the fence.
        code: without the fences.
        how: of the comment above the block, or of the page; "" if there is none.
    """

    page: str
    line: int
    language: str
    code: str
    how: str

    @property
    def num_ranks(self) -> int:
        return int(self.how.removeprefix("ranks=")) if self.how.startswith("ranks=") else 1

    @property
    def included_file(self) -> str | None:
        """The file that is the whole of the block, if it is one."""
        match = _INCLUDED.fullmatch(self.code.strip())
        return None if match is None else match[1]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def blocks_of(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in some languages, in order."""
    text = page.read_text(encoding="utf-8")
    whole_page = _WHOLE_PAGE.search(text)
    default = "" if whole_page is None else whole_page[1]
    return [
        Block(
            page.relative_to(ROOT).as_posix(),
            text.count("\n", 0, match.start("code")) + 1,
            match["language"],
            match["code"],
            default if match["how"] is None else match["how"],
        )
        for match in _FENCE.finditer(text)
        if match["language"] in languages
    ]


def commands_of(page):
    """The commands in the shell blocks of a page, as lists of words, with their places."""
    for block in blocks_of(page, "bash", "console", "sh"):
        for number, line in enumerate(block.code.replace("\\\n", " ").splitlines(), block.line):
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                del words[0]  # an environment variable
            if words:
                yield f"{block.page}:{number}", words


class Model(nn.Module):
    """The model of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.fc1 = nn.Linear(8, 24)
        self.fc2 = nn.Linear(24, 8)
        self.lm_head = nn.Linear(8, 32)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.fc2(torch.relu(self.fc1(self.embed(batch)))))


def namespace(shared_folder: Path) -> dict[str, object]:
    """What an example finds: a model, sharded where there are ranks, and what trains it."""
    torch.manual_seed(0)
    model = Model()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {
        "__name__": "example",
        "dist": dist,
        "loader": [torch.arange(32).view(4, 8) for _ in range(3)],
        "model": model,
        "nn": nn,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "prune": prune,
        "shared_folder": shared_folder,
        "torch": torch,
    }


def write_checkpoints(folder: Path) -> None:
    """A checkpoint of the model, "llama", and what the command line makes of it, "llama-50"."""
    from safetensors.torch import save_file

    from distprune.cli import main

    (folder / "llama").mkdir()
    save_file(Model().state_dict(), folder / "llama" / "model.safetensors")
    with contextlib.suppress(SystemExit):
        main(["prune", str(folder / "llama"), str(folder / "llama-50"), "--sparsity=0.5", "-q"])
    assert (folder / "llama-50").is_dir()


def write_language_models(folder: Path) -> None:
    """Small Llamas with their tokenizers, and a text, "held-out.txt"."""
    from helpers.tiny_language_model import save_tiny_llama, write_text

    for name in LANGUAGE_MODELS:
        save_tiny_llama(folder / name, max_position_embeddings=512)
    write_text(folder / "held-out.txt", 4000)


def write_files(blocks: list[Block], folder: Path) -> None:
    """The files that blocks read."""
    code = "".join(block.code for block in blocks)
    if '"llama-50"' in code:
        write_checkpoints(folder)
    if any(f'"{name}"' in code for name in LANGUAGE_MODELS):
        write_language_models(folder)


def run_blocks(blocks: list[Block], folder: Path) -> None:
    """Run blocks one after the other in one namespace; folder becomes the current one."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        names = namespace(folder)
        for block in blocks:
            # An error shows the line in the page.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, block.page, "exec"), names)
    finally:
        os.chdir(before)
