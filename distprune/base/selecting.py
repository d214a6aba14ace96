"""Which parameters are meant: patterns for names, the default selection, and the order of names.

A pattern is a glob (``*``, ``?``, ``[...]``; ``*`` crosses dots) or, after ``re:``, a regular
expression. It matches a parameter if it matches its whole name ("layers.0.mlp.weight") or that of
its module ("layers.0.mlp"). Case matters. Live models and files have these rules in common.

What is pruned by default are matrices and convolutions inside a model, by name and shape. The rules
are those of common model families, above all of transformers: embeddings, output heads,
normalisations, routers, biases and tables of positions are left alone, and so are tensors with the
shape of a matrix that are none. A tensor with only one dimension larger than 1 is a vector, and is
left alone before these rules are applied.

The table of the dtypes that safetensors headers name is the only one in the package. It speaks in
bit patterns, because numpy has no bfloat16. Importing it imports neither numpy nor torch, so that
commands that read headers alone start quickly.

    F32   s eeeeeeee fffffffffffffffffffffff      s: sign, e: exponent, f: fraction
    BF16  s eeeeeeee fffffff
    F16   s eeeee ffffffffff
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class FloatFormat(NamedTuple):
    """How the bits of a number are used: the largest exponent is that of inf and NaN.

    Attributes:
        name: as safetensors headers spell it.
        torch_name: of the torch dtype.
        num_bits: of a number, the sign included.
        inf: the pattern of +inf; larger magnitudes are NaN.
    """

    name: str
    torch_name: str
    num_bits: int
    inf: int

    @property
    def bits(self) -> type[np.unsignedinteger]:
        """The unsigned integer of a number's size."""
        import numpy as np

        return {16: np.uint16, 32: np.uint32, 64: np.uint64}[self.num_bits]

    def magnitudes(self, raw: np.ndarray) -> np.ndarray:
        """Patterns without the sign: in the order of magnitudes, 0 for both zeros.

        Args:
            raw: numbers, of any dtype, 1-d.
        """
        return raw.view(self.bits) & self.bits((1 << (self.num_bits - 1)) - 1)


# The formats that can be ranked, masked and compared: those of 16 bits and more.
PLAIN_FLOATS = {
    form.name: form
    for form in (
        FloatFormat("BF16", "bfloat16", 16, 0x7F80),
        FloatFormat("F16", "float16", 16, 0x7C00),
        FloatFormat("F32", "float32", 32, 0x7F800000),
        FloatFormat("F64", "float64", 64, 0x7FF0000000000000),
    )
}
# The other dtypes: the name of torch's ("" if torch has none with one number per element), and the
# bits of an element. Floats of 8 bits and fewer need a scale that is stored elsewhere.
NARROW_FLOATS = {
    "F8_E5M2": ("float8_e5m2", 8), "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8), "F6_E2M3": ("", 6), "F6_E3M2": ("", 6), "F4": ("", 4),
}  # fmt: skip
NOT_FLOATS = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16),
    "I16": ("int16", 16), "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64),
    "I64": ("int64", 64), "C64": ("complex64", 64),
}  # fmt: skip
_DTYPES = {form.name: (form.torch_name, form.num_bits) for form in PLAIN_FLOATS.values()}
_DTYPES |= NARROW_FLOATS | NOT_FLOATS
DTYPE_BITS = {name: num_bits for name, (_, num_bits) in _DTYPES.items()}
TORCH_NAMES = {name: torch_name for name, (torch_name, _) in _DTYPES.items() if torch_name}

_REGEX = "re:"


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a pattern matches the full name of a parameter, as a function of the name.

    Raises:
        ValueError: no regular expression after ``re:``; says why.
    """
    is_regex = pattern.startswith(_REGEX)
    try:
        found = re.compile(pattern.removeprefix(_REGEX) if is_regex else translate(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error
    is_match = found.fullmatch
    return lambda name: bool(is_match(name) or is_match(name.rpartition(".")[0]))


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """A key to sort names by: numbers in them compare as numbers."""
    return list(map(_part_key, _RUNS.findall(name)))


@functools.lru_cache(maxsize=1 << 16)
def _part_key(part: str) -> tuple[int, int, str]:
    """The key of a run of digits or of other characters; names consist of few different runs."""
    digits = part.lstrip("0")  # not int(): Python refuses numbers of thousands of digits
    return (0, len(digits), digits) if "0" <= part[0] <= "9" else (1, 0, part)


_RUNS = re.compile(r"[0-9]+|[^0-9]+")


ADAPTER = "part of an adapter"
EMBEDDING = "an embedding"
HEAD = "the output head"
NORM = "a normalisation"
_LEARNED = "a learned input"
_RULES = {
    # Parts of names, between dots, in lower case. The first rule that matches any part is the
    # reason.
    "parts": {
        ADAPTER: r"lora_.*|.*_lora_[ab]|hada_w.*|oft_[rs]|vera_.*|ia3_.*",
        "a table of relative positions": (
            r".*relative.*bias.*|.*rel_pos.*|rpb|.*bias_table|pos(ition)?_bias.*|attention_biases"
            r"|rel_logits.*|.*_ape"
        ),
        EMBEDDING: (
            r"(?!embed_out$).*embed.*|wte|wpe|shared|(.*_)?emb(_.*)?|position_?enc.*|pos_enc.*"
            r"|.*positional_encoding.*|patch_conv|codebook"
        ),
        "a router": r".*router.*|gate|.*expert_gate",
        HEAD: (
            r"(?![qkv]_head$)(.+_)?head|.+_heads|embed_out|.*classifiers?|classifier_.*|score"
            r"|(mlm|itm|itc)_score|(.*_)?predictions?|predict_.*|decoder_pred|(.*_)?cls|qa_outputs?"
            r"|logits?(_.*)?|.*_logits?|seq_relationship|pred_layer|lm_loss|ctc_proj"
            r"|.*(class|bbox|box)_predictor|vocab_(projector|transform)|output_projection.*"
            r"|sequence_summary"
        ),
        NORM: (
            r"(?!(roberta_prelayernorm|norm_attn_norm)$).*norm.*|ln(_.*)?|ln[0-9]*|.*_ln|bn[0-9]*"
            r"|.*layer_?scale.*|(.*_)?gamma(_.*)?"
        ),
        "a bias": r"bias(_[uv])?|.*_bias",
    },
    # The tensor's own name, the last part.
    "own": {
        "scales of quantised weights": r"(.*_)?scales?(_inv)?|.*zero_points?|.*zeros",
        "a convolution of single channels": r"static_weight",
        "the constants of a state space": r"a_logs?|d|dt_bias|.*_decay|time_(first|mix_.*)",
        _LEARNED: r"(.*_)?(tokens?|query|queries|latents?|latents_[12]d|probe|prompt|codevectors)",
    },
    # The name of the module of a "weight".
    "owner": {
        _LEARNED: r"(?!.*to_tokens?$)(.*_)?tokens?|query_feat|queries_features|reference_points"
    },
    # Whole names: short ones, which mean something else deeper in a model.
    "whole": {
        HEAD: r"(output|fc|proj_out|v_head\.summary)\.weight",
        EMBEDDING: r"(transformer\.)?w\.weight",
    },
}


MIN_NDIM = 2


def reason_of_shape(shape: Sequence[int], min_ndim: int = MIN_NDIM) -> str:
    """Why a tensor of this shape is left alone, also where a pattern names it; "" if it is not."""
    if 0 in shape:
        return "no elements"
    if sum(size > 1 for size in shape) >= min_ndim:
        return ""
    ones = " that are larger than 1" if len(shape) >= min_ndim else ""
    return f"fewer than {min_ndim} dimensions{ones}"


def reason_to_keep(name: str, shape: Sequence[int], dtype: str = "F32") -> str:
    """Why a tensor is left alone; "" if it is pruned.

    Args:
        name: its full name.
        shape: of the whole tensor.
        dtype: as in the header of a file.
    """
    if dtype in NOT_FLOATS:
        return f"{dtype} is no float"
    parts = name.lower().split(".")
    reasons = {_reason_in("parts", part) for part in parts}
    for reason in _RULES["parts"]:
        if reason in reasons:
            return reason
    is_weight = parts[-1] == "weight" and len(parts) > 1
    reason = _reason_in("owner", parts[-2]) if is_weight else _reason_in("own", parts[-1])
    if not reason and len(parts) <= 3:
        reason = _reason_in("whole", name)
    if not reason and len(shape) > 2 and shape[1] == 1:
        return "a convolution of single channels"
    return reason


@functools.lru_cache(maxsize=8192)
def _reason_in(kind: str, name: str) -> str:
    """The first rule of a kind that a name falls under; cached, as parts of names recur."""
    rules = _RULES[kind].items()
    return next((reason for reason, pattern in rules if re.fullmatch(pattern, name)), "")
