"""Sums over ranks of what each has seen of every input, once; as dictionaries and files."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.patterns import matcher
from distprune.files.checkpoints.statistics_file import MODES, StoredStatistics
from distprune.shards.target import Target
from distprune.statistics.collecting import LocalStatistics
from distprune.statistics.input_parts import peers_of, with_peers
from distprune.statistics.layers import WeightLayout, layout_of, refusal

# Squares on ranks with the same tokens are equal, unless their kernels add in another order.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Totals:
    """The statistics of one parameter's inputs over all ranks; equal on all of them.

    Attributes:
        num_tokens: how many inputs were seen; of fused experts, by each of them.
        sums: fp64, of the input shape: the sum of each input feature over all tokens.
        squares: fp64, of the same shape: the sum of its squares.
    """

    num_tokens: int | tuple[int, ...]
    sums: Tensor
    squares: Tensor

    def plus(self, other: Totals | None) -> Totals:
        """The statistics of all tokens of both."""
        if other is None:
            return self
        if isinstance(self.num_tokens, tuple):
            assert isinstance(other.num_tokens, tuple)
            pairs = zip(self.num_tokens, other.num_tokens, strict=True)
            num_tokens: int | tuple[int, ...] = tuple(sum(pair) for pair in pairs)
        else:
            assert isinstance(other.num_tokens, int)
            num_tokens = self.num_tokens + other.num_tokens
        return Totals(
            num_tokens,
            self.sums + other.sums,
            self.squares + other.squares,
        )


@dataclass(frozen=True)
class _Described:
    """What one rank tells the others of one parameter."""

    layout: WeightLayout
    num_places: int


def local_statistics(
    targets: Sequence[Target], communicator: Communicator
) -> list[LocalStatistics]:
    """Empty statistics of parameters; of those too that only other ranks have.

    Args:
        targets: as read_parameters returns them: the same list on all ranks.
        communicator: all ranks that take part.

    Raises:
        NotImplementedError: a parameter of a layer whose inputs are not known; on every rank.

    Cost: two all-reduces, of 16 bytes per rank, and of about 100 bytes per parameter.
    """

    def describe() -> str:
        described, obstacles = {}, {}
        for target in targets:
            found = [layout_of(*place, target.shard.shape) for place in target.places]
            layouts = [layout for layout in found if not isinstance(layout, str)]
            if len(layouts) < len(found):
                obstacles[target.label] = next(text for text in found if isinstance(text, str))
                continue
            if any(layout != layouts[0] for layout in layouts[1:]):
                raise NotImplementedError(
                    f"{target.label} is tied between layers that use it differently; expected "
                    "layers of one kind."
                )
            if layouts:
                described[target.label] = (vars(layouts[0]), len(layouts))
        if obstacles:
            raise refusal(obstacles)
        return json.dumps(described)

    texts, _ = communicator.distinct_texts(communicator.run(describe))
    known: dict[str, _Described] = {}
    for text in texts:
        for label, (layout, num_places) in json.loads(text).items():
            read = _Described(
                WeightLayout(**layout | {"shape": tuple(layout["shape"])}), num_places
            )
            if known.setdefault(label, read) != read:
                raise ValueError(
                    f"{label}: the ranks have different layers of this name ({known[label]}; and "
                    f"{read}); expected the same, or names that tell them apart."
                )
    return [
        LocalStatistics(
            target.label,
            target.places,
            known[target.label].layout,
            [0] * known[target.label].num_places,
        )
        for target in targets
    ]


def sum_over_ranks(
    parameters: Sequence[LocalStatistics],
    known: Collection[str],
    groups: set[tuple[int, ...]],
    allow_empty: Sequence[str],
    communicator: Communicator,
) -> list[Totals]:
    """Sum up what all ranks have seen. Collective.

    Of ranks that run the model on the same tokens one counts; the others are compared with it.

    Args:
        parameters: the same on every rank.
        known: labels of those that were called when earlier statistics were collected.
        groups: of ranks with the same tokens as this one.
        allow_empty: patterns of parameters that may have seen no token.
        communicator: all ranks that take part.

    Raises:
        ValueError: a layer that was not called; sums that are not finite; ranks of a
            tensor-parallel group that ran on different tokens. On every rank.

    Cost: one all-reduce of 16 bytes per input feature, and 24 and more per parameter and expert.
    """
    counts = [p.layout.num_token_counts for p in parameters]
    sizes = [
        2 + len(p.calls) + num_counts + 2 * p.layout.num_inputs
        for p, num_counts in zip(parameters, counts, strict=True)
    ]

    def pack() -> Tensor:
        peers = peers_of(groups, communicator.rank)
        rows = [_packed(p, peers, communicator.rank) for p in parameters]
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)

    shared = communicator.reduce_floats(sum(sizes), pack)
    totals, silent = [], []
    for parameter, num_counts, row in zip(
        parameters, counts, torch.split(shared, sizes), strict=True
    ):
        layout = parameter.layout
        calls, checks, tokens, both = torch.split(
            row, [len(parameter.calls), 2, num_counts, 2 * layout.num_inputs]
        )
        sums, squares = both.view(2, *layout.input_shape)
        _check(parameter.label, sums, squares, *checks.tolist())
        is_optional = parameter.label in known or any(
            matcher(pattern)(parameter.label) for pattern in allow_empty
        )
        if not is_optional and not bool(calls.all() and tokens.any()):
            silent.append(parameter.label)
        numbers = tuple(map(int, tokens.tolist()))
        num_tokens = numbers if layout.are_experts else numbers[0]
        totals.append(Totals(num_tokens, sums.clone(), squares.clone()))
    if silent:
        more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
        raise ValueError(
            f"{', '.join(silent[:5])}{more}: the layer was not called on any rank while statistics "
            "were collected, so nothing is known of its input. Either its weight is used without "
            "calling it (nn.MultiheadAttention): leave it out. Or no token came to "
            'it (an expert): allow_empty="..." gives such parameters scores of zero.'
        )
    return totals


def warn_of_empty(labels: Mapping[str, Totals], communicator: Communicator) -> None:
    """Warn, on the first rank, of parameters and experts that saw no token: scores of zero."""
    empty = []
    for label, totals in labels.items():
        if isinstance(totals.num_tokens, int):
            empty += [] if totals.num_tokens else [label]
            continue
        experts = [str(number) for number, tokens in enumerate(totals.num_tokens) if not tokens]
        if experts:
            others = f" and {len(experts) - 8} more" if len(experts) > 8 else ""
            which = "experts" if len(experts) > 1 else "expert"
            empty.append(f"{which} {', '.join(experts[:8])}{others} of {label}")
    if empty and communicator.index == 0:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        warnings.warn(
            f"no token came to {'; '.join(empty[:5])}{more}: all their scores are zero, so that "
            "they are pruned first, in the order of their elements. Collect statistics of "
            "more text, or leave them out.",
            stacklevel=4,
        )


def _packed(parameter: LocalStatistics, peers: tuple[int, ...], rank: int) -> Tensor:
    """What this rank adds: calls, two numbers that compare peers, tokens, sums and squares."""
    token_check, square_check = 0, 0.0
    tokens = [0] * parameter.layout.num_token_counts
    inputs_per_count = max(1, parameter.layout.num_inputs // max(1, len(tokens)))
    totals = torch.zeros(2, parameter.layout.num_inputs, dtype=torch.float64)
    for part, seen in parameter.seen.items():
        part = with_peers(part, peers, rank)
        local = seen.totals.cpu()
        # The first of n ranks adds (n - 1) times what each of the others takes away.
        squares = float(local[1].sum())
        square_check += (part.copies - 1 if part.is_first else -1) * squares
        token_check += (part.token_copies - 1 if part.is_first_of_tokens else -1) * seen.num_tokens
        if part.is_first_of_tokens:
            tokens[part.features.start // inputs_per_count] += seen.num_tokens
        if part.is_first:
            totals[:, part.features.start : part.features.stop] += local
    head = [*parameter.calls, token_check, square_check, *tokens]
    return torch.cat([torch.tensor(head, dtype=torch.float64), totals.view(-1)])


def _check(
    label: str, sums: Tensor, squares: Tensor, token_check: float, square_check: float
) -> None:
    if not bool(torch.isfinite(sums).all() and torch.isfinite(squares).all()):
        raise ValueError(
            f"{label}: the sum of its inputs is not finite: a NaN or an infinity was among them. "
            "Expected finite activations. Padding may hold NaN: pass its attention_mask to batch()."
        )
    if token_check or abs(square_check) > _TOLERANCE * float(squares.sum()):
        raise ValueError(
            f"{label}: ranks of one tensor-parallel group saw different inputs; expected the same "
            "batches on all of them, as tensor parallelism needs: split the data by the "
            "data-parallel rank, not by the global rank. A layer that is not parallelised, on a "
            "plain local part of a sequence, is not supported: make its input a DTensor, or leave "
            "it out."
        )


VERSION = 1


def as_stored(layout: WeightLayout, totals: Totals) -> StoredStatistics:
    """What a file has of one parameter."""
    return StoredStatistics(
        layout.kind,
        layout.shape,
        layout.groups,
        totals.num_tokens,
        totals.sums.numpy(),
        totals.squares.numpy(),
    )


def as_entry(layout: WeightLayout, totals: Totals) -> dict[str, Any]:
    """What a state dictionary has of one parameter."""
    return {
        "layout": layout.kind,
        "shape": list(layout.shape),
        "groups": layout.groups,
        "num_tokens": totals.num_tokens,
        "input_sum": totals.sums.clone(),
        "input_square_sum": totals.squares.clone(),
    }


def checked_entries(state: object) -> tuple[str, dict[str, StoredStatistics]]:
    """The mode and the statistics in a state dictionary.

    Raises:
        ValueError: it is none of ``state_dict``.
    """
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(
            f"state is no state dictionary of ActivationStatistics of version {VERSION}; expected "
            "what state_dict() returns."
        )
    mode = state["mode"]
    if mode not in MODES:
        raise ValueError(f"state has the mode {mode!r}; expected one of {MODES}.")
    return mode, {
        name: StoredStatistics(
            entry["layout"],
            tuple(entry["shape"]),
            int(entry["groups"]),
            _number_of_tokens(entry["num_tokens"]),
            _array(entry["input_sum"]),
            _array(entry["input_square_sum"]),
        )
        for name, entry in state["parameters"].items()
    }


def fitting(
    parameters: Sequence[LocalStatistics], stored: Mapping[str, StoredStatistics], where: str
) -> dict[str, Totals]:
    """The statistics of parameters among those that are stored.

    Args:
        parameters: those that are needed.
        stored: by name; more than is needed does no harm.
        where: they are stored, for messages.

    Raises:
        ValueError: statistics of a parameter are missing, or are those of another weight.
    """
    missing = [p.label for p in parameters if p.label not in stored]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            f"{where} has no statistics of {', '.join(missing[:5])}{more}; it has those of "
            f"{', '.join(list(stored)[:3])}{', ...' if len(stored) > 3 else ''}. Expected the full "
            "names of the model that they were collected on."
        )
    totals = {}
    for parameter in parameters:
        found, layout = stored[parameter.label], parameter.layout
        if (found.layout, tuple(found.shape), found.groups) != (
            layout.kind,
            layout.shape,
            layout.groups,
        ):
            raise ValueError(
                f"{parameter.label}: {where} has statistics of a weight of shape "
                f"{tuple(found.shape)} ({found.layout}, {found.groups} groups); expected "
                f"{layout.shape} ({layout.kind}, {layout.groups} groups)."
            )
        totals[parameter.label] = Totals(
            found.num_tokens, torch.from_numpy(found.sums), torch.from_numpy(found.squares)
        )
    return totals


def digest_of(totals: Mapping[str, Totals]) -> str:
    """A short text that is the same for the same statistics."""
    made = hashlib.sha256()
    for label, of_one in totals.items():
        made.update(f"{label} {of_one.num_tokens}".encode())
        made.update(of_one.sums.numpy().tobytes() + of_one.squares.numpy().tobytes())
    return made.hexdigest()[:16]


def _number_of_tokens(value: int | Sequence[int]) -> int | tuple[int, ...]:
    return tuple(map(int, value)) if isinstance(value, Sequence) else int(value)


def _array(values: Tensor) -> Any:
    return values.detach().double().cpu().numpy().copy()
