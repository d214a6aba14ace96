"""Reading the parameters of a call on every rank, and agreeing on what they are and who has them.

Copies of a parameter may lie on other meshes, and parameters in other stages of a pipeline. A
single process cannot know in which order stages would list their parameters, so the order of a
joined list is that of the full names, whoever holds them: "layers.2" before "layers.10". A rank
takes part in the ranking of parameters that it does not have with empty shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor, nn

from distprune.base.naming import checked_pair, tied_places
from distprune.base.selecting import natural_key
from distprune.call.request import Fact, ParameterArguments
from distprune.masks.hook import check_idle, check_state
from distprune.ranking.chunks import count_live
from distprune.ranks.collectives import Communicator
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import index_map
from distprune.shards.reader import ShardReader, local_part, whole_checksum
from distprune.shards.shard import Shard, at_position, checksums, replicas_agree

A = TypeVar("A", bound=ParameterArguments)

_PAIRS = (
    "(module, name) pairs, as select(model) lists them: "
    "{pair: scores[pair.fqn] for pair in select(model)}"
)


def read_parameters(
    make_arguments: Callable[[], A], communicator: Communicator
) -> tuple[A, list[Shard]]:
    """Read this rank's part of every parameter, and agree on what the parameters are.

    Args:
        make_arguments: a local step that may fail: makes and checks the arguments.
        communicator: the ranks that take part.

    Returns:
        The arguments, and the same list of parameters on every rank.

    Raises:
        Exception: what any rank raised, on every rank.
        ValueError: ranks have different parameters or facts.

    Cost: an all-reduce of 40 bytes; more where parameters lie on several meshes, or under
    ``pipeline_parallel``: see below.
    """

    def read() -> tuple[A, list[Shard]]:
        arguments = make_arguments()
        return arguments, _read(arguments, communicator)

    def facts_of(result: tuple[A, list[Shard]]) -> list[Fact]:
        arguments, shards = result
        facts = arguments.all_facts()
        if not arguments.pipeline_parallel:  # else they are compared when they are joined
            facts.append(("number of parameters", str(len(shards))))
            facts += [(shard.name, shard.facts) for shard in shards]
        return facts

    arguments, shards = communicator.run(read, facts_of)
    if arguments.pipeline_parallel:
        shards = _join(shards, communicator)
    else:
        _count_copies_on_other_meshes(shards, communicator)
    return arguments, shards


def _read(arguments: ParameterArguments, communicator: Communicator) -> list[Shard]:
    """Read every parameter; one with several names is one shard, counted once."""
    reader = ShardReader(communicator.index, communicator.size)
    shards: dict[Hashable, Shard] = {}
    for position, pair in enumerate(arguments.parameters):
        module, name = checked_pair(pair, f"parameters[{position}]")
        full_name = None if type(pair) is tuple else getattr(pair, "fqn", None)
        if full_name is None and arguments.pipeline_parallel:
            raise TypeError(
                f"parameters[{position}] is a pair without a full name; expected those that "
                "select(stage) lists, or NamedParameter(module, name, fqn), because "
                "pipeline_parallel=True joins the lists of all ranks by name."
            )
        if module._forward_pre_hooks:
            check_state(module, name)
        label = full_name or f"{type(module).__name__}.{name} (#{position})"
        shard = read = reader.read(module, name, label)
        if read.ranks is not None:
            check_idle(module, label)
        if read.key in shards:
            shard = shards[read.key]
        else:
            shards[read.key] = read
            read.is_named, read.places = full_name is not None, ((module, name),)
        if shard is not read or full_name is not None:
            tied = tied_places(pair)
            shard.is_tied |= len(tied) > 1
            # By id: modules need not be hashable.
            places = {(id(m), n): (m, n) for m, n in [*shard.places, (module, name), *tied]}
            shard.places = tuple(places.values())
    if not shards and not arguments.pipeline_parallel:
        raise ValueError("parameters is empty; expected at least one (module, name) pair.")
    names = [shard.name for shard in shards.values()]
    if arguments.pipeline_parallel and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"{twice} is the name of two different parameters on one rank; expected names that are "
            "unique over all stages: select(stage, prefix=...) tells stages apart."
        )
    inside = set(communicator.ranks)
    # Parameters of one mesh share their tuple of ranks, which may be long: it is checked once.
    sharded = [(shard.ranks, shard) for shard in shards.values() if shard.ranks is not None]
    for ranks, shard in {id(ranks): (ranks, shard) for ranks, shard in sharded}.values():
        outside = sorted(set(ranks) - inside)
        if outside:
            raise ValueError(
                f"{shard.name}: ranks {outside} hold a part of the parameter but do not take part "
                f"in the call (ranks {sorted(inside)}); expected a group that holds all of them."
            )
    for shard in shards.values():
        for module, name in shard.places[1:]:
            check_state(module, name)
            mask, other = shard.mask, reader.read(module, name, shard.name).mask
            if mask is not other and (
                mask is None or other is None or not torch.equal(mask, other)
            ):
                raise ValueError(
                    f"{shard.name} is tied, and pruned differently under its names; expected equal "
                    "masks on tied parameters. Remove the pruning of all of them first, or prune "
                    "one of them."
                )
    _put_scores(arguments, shards, reader)
    return list(shards.values())


def check_mapping(scores: object) -> None:
    """Raise TypeError for scores that are no mapping."""
    if scores is not None and not isinstance(scores, Mapping):
        raise TypeError(
            f"importance_scores is a {type(scores).__name__}; expected a dict from "
            "(module, name) to a tensor."
        )


def _put_scores(
    arguments: ParameterArguments, shards: Mapping[Hashable, Shard], reader: ShardReader
) -> None:
    """Give the shards their scores; a tied parameter may have them under any of its names.

    Raises:
        TypeError: a key that is no (module, name) pair, scores of another type.
        ValueError: a pair that is none of the parameters. Its scores would be ignored in silence,
            and the parameter that was meant would be ranked by its values. Scores of another
            layout, or different ones of a tied parameter.
    """
    scores, what = arguments.importance_scores, arguments.scores_name
    if not scores:
        return
    owner = {(id(m), name): key for key, shard in shards.items() for m, name in shard.places}
    known: set[Hashable] = set()
    for pair, given in scores.items():
        place = checked_pair(pair, "a key of importance_scores", _PAIRS)
        key = owner.get((id(place[0]), place[1]))
        if key is None:
            with suppress(AttributeError, TypeError, NotImplementedError):  # no such parameter
                key = reader.read(*place, "").key
        if key not in shards:
            raise ValueError(
                f"importance_scores has ({type(place[0]).__name__}, {place[1]!r}), which is none "
                "of the parameters of this call; expected (module, name) pairs among them."
            )
        shard = shards[key]
        part: Tensor | FactoredScores
        if isinstance(given, FactoredScores):
            given.check_shape(shard.name, shard.shape)
            part, about = given, f"factors, checksum {given.checksum()}"
        elif isinstance(given, Tensor):
            part = local_part(shard.name, what, given, shard)
            about = f"{part.dtype}, checksum {whole_checksum(given, shard)}"
        else:
            raise TypeError(
                f"{shard.name}: {what} is a {type(given).__name__}; expected a tensor or "
                "FactoredScores."
            )
        if key not in known:
            known.add(key)
            shard.scores, shard.about_scores = part, about
        elif about != shard.about_scores or (
            isinstance(part, Tensor)
            and isinstance(shard.scores, Tensor)
            and not torch.equal(part, shard.scores)
        ):
            raise ValueError(
                f"{shard.name} is tied, and {what} has different tensors under several of its "
                "names; expected one under one name, or equal ones."
            )


def _count_copies_on_other_meshes(shards: Sequence[Shard], communicator: Communicator) -> None:
    """Tell every shard how many copies of it lie outside its own mesh.

    Under FSDP2 with tensor parallelism, a layer that is not parallelised is sharded
    over the data-parallel ranks only, once for every tensor-parallel rank. Each of
    these meshes holds the whole parameter, and a rank knows its own mesh only.

    Cost: if there are such parameters, two all-reduces: 16 bytes per rank, and for each mesh its
    ranks and a number per parameter.
    """
    smaller = [s for s in shards if s.ranks is not None and len(s.ranks) < communicator.size]
    if not smaller:
        return
    meshes = list(dict.fromkeys(shard.ranks for shard in smaller))
    number_of = {ranks: number for number, ranks in enumerate(meshes)}
    mine = json.dumps([meshes, [number_of[shard.ranks] for shard in smaller]])
    texts, _ = communicator.distinct_texts(mine)
    holders: list[set[tuple[int, ...]]] = [set() for _ in smaller]
    for text in texts:
        of_rank, numbers = json.loads(text)
        for of_shard, number in zip(holders, numbers, strict=True):
            of_shard.add(tuple(of_rank[number]))
    for shard, of_shard in zip(smaller, holders, strict=True):
        _set_copies(shard, of_shard)


def _set_copies(shard: Shard, holders: Iterable[tuple[int, ...]]) -> None:
    """Let a shard know of all copies of its elements, on whatever rank or mesh."""
    assert shard.ranks is not None
    ordered = sorted(holders)
    first = ordered.index(shard.ranks) * shard.num_replicas
    shard.be_replica(first + shard.replica, shard.num_replicas * len(ordered))


def count_live_and_compare(
    targets: Sequence[Shard], reads_values: bool, communicator: Communicator
) -> list[int]:
    """Count the unpruned elements of every whole parameter, and compare replicas.

    Args:
        reads_values: compare values (or scores) too, not only masks.

    Raises:
        ValueError: replicas of a parameter differ; on every rank.

    Cost: a read of the masks, and of replicated values; an all-reduce of 24 bytes per parameter;
    see shard.[Note: no differences cancel].
    """

    masks, counted = [each.flat_mask for each in targets], [each.counted for each in targets]
    if communicator.size == 1:  # nobody to compare with
        return count_live(masks, counted)

    def count() -> Tensor:
        live = count_live(masks, counted)
        # What is compared: values and mask of every replicated parameter.
        compared = [_compared(target, reads_values) for target in targets]
        sums = iter(checksums([tensor for tensors in compared for tensor in tensors]))
        rows: list[int] = []
        for target, num_live, tensors in zip(targets, live, compared, strict=True):
            parts = [next(sums) for _ in tensors]
            rows += (num_live, *for_comparison(target, communicator.rank, *parts))
        return torch.tensor(rows, dtype=torch.int64)

    shared = communicator.reduce(3 * len(targets), count).view(-1, 3).tolist()
    for target, (_, of_all, of_first) in zip(targets, shared, strict=True):
        if not replicas_agree(target.num_replicas, of_all, of_first):
            raise ValueError(
                f"{target.name}: the ranks hold replicas of this parameter (or of its scores or "
                "mask) that differ; expected equal ones, as under DistributedDataParallel. "
                "Broadcast them from one rank first. If the ranks prune models of their own, pass "
                "a group that holds only the calling rank; if they are meant to differ in a part "
                "(experts), pass pipeline_parallel=True and names that tell these parts apart."
            )
    return [live for live, _, _ in shared]


def for_comparison(shard: Shard, rank: int, *parts: int) -> tuple[int, int]:
    """What a rank adds to the sum over all replicas, and to the sum over first replicas."""
    is_here = shard.ranks is None or rank in shard.ranks
    if shard.num_replicas == 1 or not is_here:
        return 0, 0
    mixed = at_position(shard.position, *parts)
    return mixed, mixed if shard.replica == 0 else 0


def _compared(shard: Shard, reads_values: bool) -> list[Tensor]:
    if shard.num_replicas == 1:
        return []
    # Factors of scores are compared with the arguments: they are whole on every rank.
    scores = shard.scores if isinstance(shard.scores, Tensor) else shard.values
    ranked = [scores] if reads_values else []
    return ranked if shard.mask is None else [*ranked, shard.mask]


# What one rank tells the others of one parameter, as JSON: its facts; its shape; the dtype of the
# scores, or of the values; the ranks that hold it together, none if each has a copy of its own; the
# number of replicas among these.
_Entry = tuple[str, tuple[int, ...], str, tuple[int, ...], int]


def _join(shards: Sequence[Shard], communicator: Communicator) -> list[Shard]:
    """Every parameter that any rank has, in the order of names; the same list on all ranks.

    Args:
        shards: this rank's, with full names as labels, each name once.
        communicator: all ranks that take part.

    Raises:
        ValueError: ranks describe a parameter of one name differently; on every rank.

    Cost: four all-reduces: 16 bytes per rank, about 200 bytes per parameter and kind of stage, and
    two small ones.
    """
    mine = communicator.run(lambda: json.dumps({shard.name: _entry(shard) for shard in shards}))
    texts, kinds = communicator.distinct_texts(mine)
    own = {shard.name: shard for shard in shards}
    device = shards[0].values.device if shards else torch.device("cpu")

    def join() -> list[Shard]:
        stages: list[dict[str, _Entry]] = list(map(json.loads, texts))
        entries: dict[str, _Entry] = {}
        holders: dict[str, set[tuple[int, ...]]] = {}
        for rank, kind in zip(communicator.ranks, kinds, strict=True):
            for name, entry in stages[kind].items():
                facts, other, ranks = entries.setdefault(name, entry)[0], entry[0], entry[3]
                if facts != other:
                    raise ValueError(
                        f"{name}: ranks hold different parameters of this name ({facts}; and "
                        f"{other}). Expected names that are unique over all stages: "
                        "select(stage, prefix=...) puts a stage's place in the model before its "
                        "names."
                    )
                holders.setdefault(name, set()).add(tuple(ranks) or (rank,))
        if not entries:
            raise ValueError("parameters is empty on every rank; expected at least one parameter.")
        for name, shard in own.items():
            if shard.ranks is None:  # it was read as if every rank of the call had a copy
                shard.ranks = (communicator.rank,)
                shard.be_replica(0, 1)
            _set_copies(shard, holders[name])
        return [
            own.get(name) or _absent(name, entries[name], len(holders[name]), device)
            for name in sorted(entries, key=natural_key)
        ]

    return communicator.run(join)


def _entry(shard: Shard) -> _Entry:
    scores = shard.scores if isinstance(shard.scores, Tensor) else shard.values
    dtype = scores.dtype
    if isinstance(shard.scores, FactoredScores):
        dtype = torch.promote_types(dtype, torch.float32)
    num_replicas = 1 if shard.ranks is None else shard.num_replicas
    name = str(dtype).removeprefix("torch.")
    return shard.facts, tuple(shard.shape), name, shard.ranks or (), num_replicas


def _absent(name: str, entry: _Entry, num_holders: int, device: torch.device) -> Shard:
    """A parameter of other ranks: no element of it is here."""
    _, shape, dtype, _, num_replicas = entry
    values = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    index, copies = index_map((0,), [range(0)], [0]), (0, num_holders * num_replicas)
    shard = Shard(name, values, values, None, torch.Size(shape), index, True, *copies)
    shard.ranks, shard.key = (), name
    return shard


S = TypeVar("S", Tensor, FactoredScores, Tensor | FactoredScores)


class SignedScores(dict[tuple[nn.Module, str], S]):
    """Importance scores of which the lowest, signed, are to be pruned: -2 before -1 before 1.

    A criterion with signed scores returns them. A method that ranks by |score| would prune those
    next to zero, which are neither the best nor the worst, so it is refused.
    """


def check_order(scores: object, ignores_sign: bool, expected: str) -> None:
    """Refuse signed scores where they would be ranked by their absolute values.

    Args:
        expected: the argument to pass instead, for the message.

    Raises:
        TypeError: says which argument to pass.
    """
    if isinstance(scores, SignedScores) and ignores_sign:
        raise TypeError(
            "the scores are signed, of a criterion of which the lowest are to be pruned, negative "
            f"ones first, and would be ranked by |score|; expected {expected}."
        )
