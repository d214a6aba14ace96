"""What a language model says: a text goes on with the likeliest token, again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from distprune.language_models.losses import logits_of
from distprune.language_models.running import check_run, in_eval_mode, inputs_of, output_of
from distprune.language_models.text import TokenWindows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def continued(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int = 24
) -> str:
    """The text that follows. Collective where the model is sharded.

    Without a cache of keys and values, so that it runs on every wrapper: for a sentence, not for a
    page. It ends early at the tokenizer's token for the end.

    Raises:
        ValueError: the text has no tokens, or the model has fewer positions.

    Cost: a forward for each token.
    """
    ids = torch.tensor([tokenizer(text)["input_ids"]], dtype=torch.int64)
    if not ids.numel():
        raise ValueError(f"the text {text!a} has no tokens; expected some words.")
    first = ids.shape[1]
    with in_eval_mode(model):
        for _ in range(num_tokens):
            windows = TokenWindows(("",), ids, ids[:, 0], None, has_bos=False)
            check_run(model, windows, 1)
            output = output_of(model, input_ids=inputs_of(model, windows, slice(0, 1)))
            token = logits_of(output)[:, -1].float().argmax(dim=-1).cpu()
            ids = torch.cat([ids, token[:, None]], dim=1)
            if int(token) == tokenizer.eos_token_id:
                break
    return str(tokenizer.decode(ids[0, first:], skip_special_tokens=True))
