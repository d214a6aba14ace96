"""Text files as windows of tokens, for calibration and evaluation.

[Note: windows] Each file is tokenised from its beginning and cut into windows of equal length that
do not overlap. What is left at its end is dropped. If the tokenizer puts a beginning-of-sequence
token (bos) in front of a text, every window begins with one: models that were trained with it give
the first tokens of a window without it a loss that says nothing about the text. Such a window has
``length - 1`` tokens of text, all of which are predicted; without bos it has ``length``, and the
first is not predicted. Other special tokens, such as one for the end, are not added.

[Note: pieces] A file is read and tokenised in pieces of up to 262,144 characters. A piece ends
after a line break that is followed by a character other than white space. Tokenizers that split a
text into words first, as those of GPT-2, Llama 3 and Qwen, give the same tokens as for the whole
file. Those that put a space in front of a text, as that of Llama 2, put one in front of each piece.
The pieces of a file do not depend on how much of it is read: with a limit, the windows are the
first ones of those without.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from distprune.files.errors import TextError
from distprune.ranks.process_groups import world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Path = str | os.PathLike[str]

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

    @classmethod
    def without_text(cls, tokens: Tensor) -> TokenWindows:
        """Windows of tokens that are of no file."""
        text_of = torch.zeros(len(tokens), dtype=torch.int64)
        return cls(("",), tokens, text_of, has_bos=False)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.tokens.shape[1]

    @property
    def num_predicted(self) -> int:
        """Tokens of a window that are predicted: all but the first."""
        return self.length - 1

    def sample(self, num_windows: int, *, seed: int = 0) -> TokenWindows:
        """Some of the windows, drawn at random without replacement, in their order.

        Args:
            num_windows: how many.
            seed: the same seed draws the same windows on every rank and machine.

        Raises:
            ValueError: fewer windows than that.
        """
        if not 1 <= num_windows <= len(self):
            raise ValueError(
                f"num_windows={num_windows} of {len(self)} windows; expected a number from 1 to "
                f"{len(self)}: give more text, or take fewer windows."
            )
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(self), generator=generator)[:num_windows].sort().values
        return TokenWindows(self.texts, self.tokens[rows], self.text_of[rows], self.has_bos)

    def digests(self) -> list[tuple[str, str]]:
        """For each text a label, and a hash of its windows."""
        facts = []
        for number, name in enumerate(self.texts):
            rows = self.text_of == number
            made = hashlib.sha256(str(tuple(self.tokens[rows].shape)).encode())
            made.update(self.tokens[rows].numpy().tobytes())
            facts.append((f"tokens of {name}", made.hexdigest()[:16]))
        return facts


def read_windows(
    tokenizer: PreTrainedTokenizerBase,
    files: Path | Sequence[Path],
    length: int,
    *,
    limit: int | None = None,
) -> TokenWindows:
    """Read text files as windows of tokens; see [Note: windows]. Collective over all ranks.

    Args:
        tokenizer: of transformers.
        files: text in UTF-8, each read by every rank.
        length: tokens of a window, at least 2.
        limit: windows of each file, at most; what comes after them is not read.

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
        if not names:
            raise ValueError("files is empty; expected at least one text file.")
        if length < 2:
            raise ValueError(f"length={length}; expected at least 2 tokens: one predicts the next.")
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}; expected at least 1 window of each file, or None.")
        return _read(tokenizer, [os.fsdecode(name) for name in names], length, limit)

    communicator = world()
    with communicator.exclusively():
        return communicator.run(
            read, lambda made: [("length of windows", str(length)), *made.digests()]
        )


def _read(tokenizer: Any, names: list[str], length: int, limit: int | None) -> TokenWindows:
    bos = bos_in_front(tokenizer)
    tokens, text_of = [], []
    for number, name in enumerate(names):
        for rows in _windows_of(tokenizer, name, length, bos, limit):
            tokens.append(rows)
            text_of.append(np.full(len(rows), number, np.int64))
    return TokenWindows(
        tuple(names),
        torch.from_numpy(np.concatenate(tokens)),
        torch.from_numpy(np.concatenate(text_of)),
        bos is not None,
    )


def bos_in_front(tokenizer: Any) -> int | None:
    """The bos token, if the tokenizer puts it in front of a text."""
    ids = tokenizer("a", verbose=False).input_ids
    bos: int | None = tokenizer.bos_token_id
    return bos if bos is not None and ids[:1] == [bos] else None


def _windows_of(
    tokenizer: Any, name: str, length: int, bos: int | None, limit: int | None
) -> Iterator[np.ndarray]:
    """The windows of a file, some at a time: int64 [n, length]."""
    width = length if bos is None else length - 1  # tokens of text
    ids, num_made, num_tokens = np.zeros(0, np.int64), 0, 0
    for piece in _pieces(name):
        # Not verbose: it would warn of texts longer than the model's context.
        made = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        ids = np.concatenate([ids, np.asarray(made, np.int64)])
        num_tokens += len(made)
        count = len(ids) // width
        if limit is not None:
            count = min(count, limit - num_made)
        if not count:
            continue
        num_made += count
        rows = ids[: count * width].reshape(count, width)
        if bos is not None:
            rows = np.concatenate([np.full((count, 1), bos, np.int64), rows], axis=1)
        yield rows
        ids = ids[count * width :]
        if num_made == limit:
            return
    if not num_made:
        raise TextError(
            f"{name} has {num_tokens} tokens; expected at least {width}, one window of "
            f"length={length}{'' if bos is None else ' with its bos token'}. Give more text, or "
            "make the windows shorter."
        )


def _pieces(name: str) -> Iterator[str]:
    """The text of a file in pieces; see [Note: pieces]."""
    try:
        with open(name, encoding="utf-8-sig", newline="") as file:
            text = ""
            while True:
                more = file.read(_PIECE)
                text += more
                if not more:
                    break
                while len(text) > _PIECE:
                    end = _end_of_piece(text)
                    yield text[:end]
                    text = text[end:]
            if text:
                yield text
    except UnicodeDecodeError as error:
        raise TextError(
            f"{name} is not text in UTF-8: it has the byte 0x{error.object[error.start]:02x} where "
            "none can be. Convert it (iconv -t utf-8)."
        ) from error
    except OSError as error:
        raise TextError(f"{name} cannot be read: {error.strerror or error}.") from error


def _end_of_piece(text: str) -> int:
    """Where the first piece of a text ends."""
    for pattern in _ENDS_OF_PIECES:
        *_, last = (None, *pattern.finditer(text, 0, _PIECE))
        if last is not None:
            return last.end()
    return _PIECE
