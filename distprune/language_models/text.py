"""Text files as windows of tokens, for calibration and evaluation.

[Note: windows] Each file is tokenised from its beginning and cut into windows of equal length that
do not overlap. What is left at its end is dropped. If the tokenizer puts a beginning-of-sequence
token (bos) in front of a text, every window begins with one: models that were trained with it give
the first tokens of a window without it a loss that says nothing about the text. Such a window has
``length - 1`` tokens of text, all of which are predicted; without bos it has ``length``, and the
first is not predicted. Other special tokens, such as one for the end, are not added.

[Note: pieces] A text is tokenised in pieces of up to 262,144 characters. A piece ends
after a line break that is followed by a character other than white space. Tokenizers that split a
text into words first, as those of GPT-2, Llama 3 and Qwen, give the same tokens as for the whole
file. Those that put a space in front of a text, as that of Llama 2, put one in front of each piece.
The pieces of a file do not depend on how much of it is read: with a limit, the windows are the
first ones of those without.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distprune.files.disk import write_atomically
from distprune.files.errors import TextError
from distprune.ranks.collectives import world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters that are tokenised together; see [Note: pieces]. With four times as many, memory grows
# by 100 MB with every piece: what tokenizers return is not given back.
_PIECE = 1 << 18
_ENDS_OF_PIECES = (re.compile(r"\n(?=\S)"), re.compile(r"\s(?=\S)"))


@dataclass(frozen=True)
class TokenWindows:
    """Windows of tokens, and the text that each is from; the same on every rank.

    Attributes:
        texts: the names of the texts.
        tokens: int64 [windows, length], in the order of the texts.
        text_of: int64 [windows], for each window the number of its text.
        has_bos: whether every window begins with a bos token; see [Note: windows].
    """

    texts: tuple[str, ...]
    tokens: Tensor
    text_of: Tensor
    has_bos: bool

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.tokens.shape[1]

    def sample(self, num_windows: int, *, seed: int = 0) -> TokenWindows:
        """As many windows of each text, drawn at random without replacement, in their order.

        Args:
            num_windows: of each text.
            seed: the same seed draws the same windows on every rank and machine.

        Raises:
            ValueError: a text with fewer windows than that.
        """
        chosen = []
        for number, name in enumerate(self.texts):
            rows = (self.text_of == number).nonzero()[:, 0]
            if not 1 <= num_windows <= len(rows):
                raise ValueError(
                    f"{num_windows} windows of each text are asked for, and {name} has "
                    f"{len(rows)}; expected at least 1, and not more than there are: give more "
                    "text, or take fewer windows."
                )
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randperm(len(rows), generator=generator)[:num_windows]
            chosen.append(rows[drawn.sort().values])
        rows = torch.cat(chosen)
        return TokenWindows(self.texts, self.tokens[rows], self.text_of[rows], self.has_bos)

    def __add__(self, other: TokenWindows) -> TokenWindows:
        """The windows of both; they are equally long."""
        return TokenWindows(
            self.texts + other.texts,
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.text_of, other.text_of + len(self.texts)]),
            self.has_bos and other.has_bos,
        )

    def save(self, path: str | os.PathLike[str], origin: str = "") -> None:
        """Write the windows to a safetensors file, which ``read_windows`` takes as a text. Local.

        Args:
            path: of the file; it is replaced at the end.
            origin: what :func:`origin_of` is to return.

        Raises:
            OSError: the file cannot be written.
        """
        from safetensors.torch import save

        # One key alone: the library writes several in any order.
        write_atomically(Path(path), save({"tokens": self.tokens.contiguous()}, {"origin": origin}))

    def digests(self) -> list[tuple[str, str]]:
        """For each text a label, and a hash of its windows."""
        facts = []
        for number, name in enumerate(self.texts):
            rows = self.tokens[self.text_of == number]
            digest = sha256(rows.numpy().tobytes()).hexdigest()[:16]
            facts.append((f"tokens of {name}", f"{tuple(rows.shape)} {digest}"))
        return facts


def read_windows(
    tokenizer: PreTrainedTokenizerBase,
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    length: int,
    *,
    limit: int | None = None,
) -> TokenWindows:
    """Read text files as windows of tokens; see [Note: windows]. Collective over all ranks.

    Args:
        tokenizer: of transformers.
        files: text in UTF-8, or windows of ``TokenWindows.save`` (``*.safetensors``); each is read
            by every rank.
        length: tokens of a window, at least 2.
        limit: windows of each file, at most; what comes after them is not tokenised.

    Raises:
        TextError: a ValueError; a file that cannot be read, is not UTF-8, is empty, or is shorter
            than one window.
        ValueError: ``length`` or ``limit`` out of range; no files; ranks that read different
            text: the file is named. On every rank.

    Cost: 8 bytes of memory per token, for a while twice as many; about 100 MB for the piece that
    is tokenised. Half a million tokens in a second. On the wire 40 bytes.
    """
    names = [files] if isinstance(files, (str, os.PathLike)) else list(files)

    def read() -> TokenWindows:
        if not names or length < 2 or (limit is not None and limit < 1):
            raise ValueError(
                f"{len(names)} files, length={length}, limit={limit}; expected at least one file, "
                "2 tokens of a window, and 1 window of each file."
            )
        # The bos token, if the tokenizer puts it in front of a text.
        first = tokenizer("a", verbose=False).input_ids[:1]
        bos = first if first == [tokenizer.bos_token_id] else []
        texts = tuple(map(os.fsdecode, names))
        parts = [
            _saved(text, length, limit)
            if text.endswith(".safetensors")
            else _windows_of(tokenizer, text, length, bos, limit)
            for text in texts
        ]
        counts = torch.tensor([len(rows) for rows in parts])
        text_of, tokens = torch.arange(len(texts)).repeat_interleave(counts), torch.cat(parts)
        has_bos = bool(bos) and bool((tokens[:, 0] == bos[0]).all())
        return TokenWindows(texts, tokens, text_of, has_bos)

    with world().exclusively():
        return world().run(read, lambda made: [("length of windows", str(length)), *made.digests()])


def origin_of(path: Path) -> str:
    """What made a file of windows, as ``TokenWindows.save`` was told; "" if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return str((file.metadata() or {}).get("origin", ""))
    except (OSError, SafetensorError):
        return ""


def _saved(name: str, length: int, limit: int | None) -> Tensor:
    """The windows of ``TokenWindows.save``."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(name, "pt") as file:
            tokens: Tensor = file.get_tensor("tokens")
    except (OSError, SafetensorError) as error:
        raise TextError(f"{name} cannot be read as windows of tokens: {error}.") from error
    if tokens.ndim != 2 or tokens.shape[1] != length:
        raise TextError(f"{name} has windows {list(tokens.shape)}; expected length={length}.")
    return tokens[:limit]


def _windows_of(
    tokenizer: Any, name: str, length: int, bos: list[int], limit: int | None
) -> Tensor:
    """The windows of a file, int64 [n, length]."""
    width = length - len(bos)  # tokens of text
    parts: list[Tensor] = []
    num_tokens = 0
    for piece in _pieces(name):
        # Not verbose: it would warn of texts longer than the model's context.
        ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(torch.tensor(ids, dtype=torch.int64))
        num_tokens += len(ids)
        if limit is not None and num_tokens >= limit * width:
            break
    count = num_tokens // width if limit is None else min(num_tokens // width, limit)
    if not count:
        raise TextError(
            f"{name} has {num_tokens} tokens; expected at least {width}, one window of "
            f"length={length}{' with its bos token' if bos else ''}. Give more text, or make the "
            "windows shorter."
        )
    rows = torch.cat(parts)[: count * width].view(count, width)
    return torch.cat([torch.tensor(bos, dtype=torch.int64).expand(count, -1), rows], dim=1)


def _pieces(name: str) -> Iterator[str]:
    """The text of a file in pieces; see [Note: pieces]."""
    try:
        text = Path(name).read_bytes().decode("utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise TextError(f"{name} cannot be read as text in UTF-8: {error}.") from error
    start = 0
    while len(text) - start > _PIECE:
        end = start + _PIECE
        for pattern in _ENDS_OF_PIECES:
            if ends := [match.end() for match in pattern.finditer(text, start, start + _PIECE)]:
                end = ends[-1]
                break
        yield text[start:end]
        start = end
    yield text[start:]
