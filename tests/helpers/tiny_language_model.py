"""A tiny Llama, a tokenizer of bytes, and texts, as users have them in folders and files."""

import random

import torch

WORDS = [
    "the", "weights", "of", "a", "layer", "are", "pruned", "and", "kept;", "naïve", "—", "数",
    "tokens", "are", "counted", "in", "bytes",
]  # fmt: skip


def tiny_tokenizer(*, bos: bool = True):
    """A tokenizer like Llama 3's, with 256 bytes, a few merges and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("t", "h"), ("th", "e"), ("e", "n"), ("Ġ", "the")]
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


_ARGUMENTS = {
    "vocab_size": 264, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


def tiny_llama(name="LlamaForCausalLM", **changes):
    """A Llama of 2 layers for :func:`tiny_tokenizer`; every call gives the same values."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**_ARGUMENTS | changes)).eval()


def write_text(path, num_words, *, seed=0):
    """Write a file of words, some of them not in ASCII, in lines and paragraphs."""
    chosen = random.Random(seed)
    words = [chosen.choice(WORDS) + chosen.choice("   \n\n") for _ in range(num_words)]
    path.write_text("".join(words), encoding="utf-8", newline="")
    return path


def windows_of(folder, limit, length=16):
    """The first windows of "text.txt" in a folder."""
    from distprune.language_models import read_windows

    return read_windows(tiny_tokenizer(), folder / "text.txt", length, limit=limit)


def save_tiny_llama(folder, **changes):
    """Write a folder with a Llama and its tokenizer, as the Hugging Face hub has them."""
    tiny_llama(**changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_mixtral(folder):
    """The same with a mixture of 4 experts, two of them for each token."""
    return save_tiny_llama(folder, name="MixtralForCausalLM", num_local_experts=4)
