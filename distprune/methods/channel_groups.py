"""Which slices of which parameters are one channel: the groups of ``global_structured``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from distprune._common.naming import checked_pair, label_of


@dataclass(frozen=True)
class ChannelPart:
    """The part that one parameter has in the channels of a group.

    Channel c has the indices from ``c * size`` up to ``(c + 1) * size`` of ``dim``, with all
    elements there.

    Args:
        parameter: a (module, name) pair, as ``select`` lists them.
        dim: the channels' dimension: 0 for the outputs of a linear layer, 1 for its inputs.
        size: indices per channel: 1 for neurons, the size of a head for heads.
        is_ranked: whether its elements count for the norm of a channel. Those of a part that does
            not count (a bias, say) are pruned together with the others.

    Raises:
        TypeError: a pair, a dimension or a size of another type.
        ValueError: a size below 1.
    """

    parameter: tuple[nn.Module, str]
    dim: int
    size: int = 1
    is_ranked: bool = True

    def __post_init__(self) -> None:
        checked_pair(self.parameter, "parameter of a ChannelPart")
        for name, value in (("dim", self.dim), ("size", self.size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    f"{name}={value!r} of {self.label} is a {type(value).__name__}; expected an "
                    "int."
                )
        if self.size < 1:
            raise ValueError(f"size={self.size} of {self.label}; expected 1 or more.")

    @property
    def label(self) -> str:
        """The parameter's name, for messages."""
        return label_of(self.parameter)


@dataclass(frozen=True)
class ChannelGroup:
    """Parameters whose channels go together: channel c is slice c of each part.

    Neurons of a gated MLP, and heads of an attention in which ``n`` query heads share a key-value
    head, each of ``d`` features:

        ChannelGroup([ChannelPart((mlp.gate_proj, "weight"), 0),
                      ChannelPart((mlp.up_proj, "weight"), 0),
                      ChannelPart((mlp.down_proj, "weight"), 1)])
        ChannelGroup([ChannelPart((attention.q_proj, "weight"), 0, n * d),
                      ChannelPart((attention.k_proj, "weight"), 0, d),
                      ChannelPart((attention.v_proj, "weight"), 0, d),
                      ChannelPart((attention.o_proj, "weight"), 1, n * d)])

    Args:
        parts: at least one that is ranked. All have the same number of channels.
        name: what reports, messages and bounds call it; by default the first parameter's name.

    Raises:
        TypeError: parts of another type.
        ValueError: no part is ranked.
    """

    parts: Sequence[ChannelPart]
    name: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.parts, str) or not isinstance(self.parts, Sequence):
            raise TypeError(
                f"parts of a ChannelGroup is a {type(self.parts).__name__}; expected a sequence of "
                "ChannelParts."
            )
        for part in self.parts:
            if not isinstance(part, ChannelPart):
                raise TypeError(
                    f"parts of a ChannelGroup has a {type(part).__name__}; expected ChannelParts."
                )
        if not any(part.is_ranked for part in self.parts):
            raise ValueError(
                f"ChannelGroup {self.name or '(without a name)'} has no part that is ranked; "
                "expected one at least."
            )

    @property
    def label(self) -> str:
        """Its name, or that of its first parameter."""
        return self.name or self.parts[0].label
