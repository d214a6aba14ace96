"""Text that a language model writes itself: calibration for all kinds of text that it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distprune.base.naming import unwrap
from distprune.language_models import running
from distprune.language_models.losses import FINITE, logits_of
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_TEXT, WRITTEN = "own text", 32  # windows at a time
# A window that repeats itself has fewer distinct runs of four tokens, and is drawn again; after so
# many draws it is taken as it is.
_DISTINCT, _RUN, _NUM_DRAWS = 0.7, 4, 8
# What versions of transformers call the keys and values of earlier tokens.
_CACHES = ("cache", "past_key_values")


def write_text(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    windows: int = 32,
    length: int = 1024,
    seed: int = 0,
    batch_size: int = WRITTEN,
    progress: running.Report | None = None,
) -> TokenWindows:
    """Let a language model write text to calibrate with. Collective over all ranks.

    windows = write_text(model, tokenizer, windows=32, length=1024)
    windows.save("own_text.safetensors")

    Tokens are sampled one after the other from all that the model predicts, at temperature 1,
    beginning with the first token that it knows (bos). With a chat template, every second window is
    a conversation, whose question the model writes, too. A window that repeats itself, in which
    less than 70 % of the runs of four tokens are distinct, is drawn again, up to seven times.

    The data-parallel ranks share the windows. The random numbers of a window depend on ``seed`` and
    its number alone; its tokens also on the rounding of the model's logits. So ranks, batches or
    devices of another kind may write other text: save the windows to use the same ones again.

    Args:
        model: of transformers, plain or wrapped.
        tokenizer: of the model.
        windows, length: how many windows, of how many tokens.
        seed: other numbers give other text.
        batch_size: windows that a rank writes at a time.
        progress: called after every batch, on every rank.

    Returns:
        The windows, the same on every rank.

    Raises:
        ValueError: sizes out of range; a model without a first token, or with fewer positions;
            logits that are not finite. On every rank.
        TypeError: a model that returns no logits.
        NotImplementedError: as :func:`running.data_ranks`.

    Cost: ``length`` forwards of one token for each batch, with a cache of keys and values where the
    model has one, and 20 bytes of memory for each of the batch's logits.

    Source: Williams et al., Self-calibration, arXiv 2410.17170; Xu et al., Magpie, arXiv
    2406.08464, for the questions.
    """
    communicator = world()

    def begin() -> list[list[int]]:
        if windows < 1 or length < 2:
            raise ValueError(f"{windows} windows of length={length}; expected 1 of 2, at least.")
        return _prompts(model, tokenizer)

    facts = [("windows, length, seed", f"{windows}, {length}, {seed}")]
    prompts = communicator.run(begin, lambda found: [*facts, ("first tokens", str(found))])
    known = torch.full((windows, length), -1)
    for number, row in enumerate(known):
        prompt = prompts[number % len(prompts)][:length]
        row[: len(prompt)] = torch.tensor(prompt)
    text_of = torch.zeros(windows, dtype=torch.int64)
    first = TokenWindows((OWN_TEXT,), known.clamp(min=0), text_of, has_bos=False)
    ranks = running.check_same(model, first, batch_size)
    missing, found = list(range(ranks.index, windows, ranks.size)), torch.zeros_like(known)
    finished = running.reporter("write", windows, progress)

    def write(numbers: Sequence[int], draw: int) -> list[int]:
        """Write some windows; those of them that repeat themselves, if they can be drawn again."""
        chances = torch.stack([_random(seed, number, draw, length) for number in numbers or [0]])
        rows = _extend(model, known[numbers or [0]], 1, partial(_at, chances))
        found[numbers] = rows[: len(numbers)]
        return [n for n in numbers if draw < _NUM_DRAWS - 1 and _repeats_itself(found[n])]

    with communicator.raising_everywhere(), running.in_eval_mode(model), torch.no_grad():
        for draw in range(_NUM_DRAWS):
            numbers, missing = missing, []
            # FSDP communicates in a forward, so that every rank runs as many.
            most = int(communicator.max(torch.tensor([len(numbers)])))
            for start in range(0, most, batch_size):
                batch = numbers[start : start + batch_size]
                again = communicator.run(partial(write, batch, draw))
                missing += again
                num_done = (len(batch) - len(again)) * ranks.is_counted
                finished(int(communicator.sum(torch.tensor([num_done]))))
    own = found if ranks.is_counted else torch.zeros_like(found)
    tokens = communicator.sum(own.view(-1)).view(windows, length)
    has_bos = bool((tokens[:, 0] == tokenizer.bos_token_id).all())
    return TokenWindows((OWN_TEXT,), tokens, text_of, has_bos)


def _prompts(model: nn.Module, tokenizer: Any) -> list[list[int]]:
    """The tokens with which windows begin: the first token, and what comes before a question."""
    config = getattr(unwrap(model), "config", None)
    tokens = (tokenizer.bos_token_id, getattr(config, "bos_token_id", None), tokenizer.eos_token_id)
    first = next((token for token in tokens if token is not None), None)
    if first is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has neither bos_token nor eos_token, with which a text "
            "begins; expected one of them. Give a text of your own."
        )
    prompts = [[first]]
    if getattr(tokenizer, "chat_template", None):
        question = "QUESTION"
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False).partition(question)[0]
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"] or [first])
    return prompts


def _random(seed: int, number: int, draw: int, length: int) -> Tensor:
    """The random numbers of a window, fp64 [length] in [0, 1)."""
    generator = torch.Generator().manual_seed((seed << 32) + number * _NUM_DRAWS + draw)
    return torch.rand(length, generator=generator, dtype=torch.float64)


def _at(chances: Tensor, logits: Tensor, position: int) -> Tensor:
    """The tokens at which random numbers, fp64 [windows, length] in [0, 1), are."""
    share = logits.softmax(-1).double().cumsum(-1)
    chance = chances[:, position, None].to(share.device) * share[:, -1:]
    return torch.searchsorted(share, chance, right=True)[:, 0]


def _extend(
    model: nn.Module, known: Tensor, first: int, choose: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Windows, token by token.

    Args:
        known: int64 [windows, length]: tokens, and -1 where the model writes them.
        first: how many tokens all windows have, on every rank: they run as one forward.
        choose: tokens for a position, from float32 logits [windows, vocabulary].
    """
    known = running.on_device_of(model, known)
    tokens, arguments = known.clone(), dict[str, Any]()
    if running.accepts(model, "use_cache"):
        arguments["use_cache"] = True
    cache = next((name for name in _CACHES if running.accepts(model, name)), "")
    for position in range(first, known.shape[1]):
        begin = 0 if arguments.get(cache) is None else position - 1
        output = model(input_ids=tokens[:, begin:position], **arguments)
        if cache:
            arguments[cache] = getattr(output, cache, None)
        logits = logits_of(output)[:, -1].float()
        if not bool(logits.max(-1).values.isfinite().all()):
            raise ValueError(f"the logits of token {position} are not finite; {FINITE}")
        tokens[:, position] = torch.where(
            known[:, position] < 0, choose(logits, position), known[:, position]
        )
    return tokens.cpu()


def _repeats_itself(window: Tensor) -> bool:
    runs = window.unfold(0, _RUN, 1) if len(window) >= _RUN else window[None]
    return len({*map(tuple, runs.tolist())}) < _DISTINCT * len(runs)


def continued(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int = 24
) -> str:
    """The text that follows, always by the likeliest token. Collective where the model is sharded.

    It ends early at the tokenizer's token for the end.

    Raises:
        ValueError: the text has no tokens, or the model has fewer positions.

    Cost: a forward for each token.
    """
    ids: Any = tokenizer(text)["input_ids"]
    if not ids:
        raise ValueError(f"the text {text!a} has no tokens; expected some words.")
    known = torch.tensor([ids + [-1] * num_tokens])
    running.check_run(model, known)
    with running.in_eval_mode(model), torch.no_grad():
        whole = _extend(model, known, len(ids), lambda logits, _: logits.argmax(-1))
    row = whole[0, len(ids) :].tolist()
    end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
    return str(tokenizer.decode(row[:end], skip_special_tokens=True))
