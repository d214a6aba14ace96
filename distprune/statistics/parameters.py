"""What all statistics have in common: layers and their inputs, sums over the ranks, and files.

A parameter that several ranks have is seen in parts, and ranks that run the same data see the same.
So each kind of statistics is one fp64 vector for each parameter, to which every rank adds what is
its own, and one all-reduce adds these up.

[Note: input shape] A weight has an *input shape*: one statistic for each input feature that it
multiplies.

    layer                    weight                  input shape        one token is
    nn.Linear                [out, in]               [in]               a row of the input
    transformers' Conv1D     [in, out]               [in]               a row of the input
    nn.Conv1d, nn.Conv2d     [out, in / groups, *k]  [in, *k]           a position of the output
    fused experts            [experts, out, in]      [experts, in]      a row that came to an expert
    fused experts that say   [experts, in, out]      [experts, in]      a row that came to an expert
    ``is_transposed``

[Note: parts of an input] What a rank sees, by the way in which a layer is parallelised:

                          input of the layer       tokens of the ranks     features of the ranks
    plain, DDP, FSDP      a plain tensor           different               all
    colwise TP            Replicate                the same: one counts    all
    rowwise TP            Shard(-1)                the same: one counts    different
    sequence parallel     Shard(0), Shard(1)       different               all

A plain input of a layer that is not parallelised, in a model with layers that are, is the same on
the ranks of a tensor-parallel group. These ranks are known from the other layers:
:func:`peers_of`.

transformers' own tensor parallelism calls layers with the local tensors: :func:`as_dtensor`.
That they are what they are taken for is seen when ranks that should have the same are compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from distprune.base.amount import listed
from distprune.base.blocks import WeightLayout
from distprune.base.naming import NamedParameter, unwrap
from distprune.base.pruned_form import is_dtensor, local_tensor
from distprune.call.reading import read_parameters
from distprune.call.request import ParameterArguments
from distprune.files.statistics_file import (
    StoredStatistics,
    read_statistics,
    scored_as_siblings,
    write_statistics,
)
from distprune.ranks.collectives import Communicator
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import dim_coordinates
from distprune.shards.shard import Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Convolution = nn.Conv1d | nn.Conv2d

# Of transformers, whose classes need not be loaded: module, class, and kind of the weight.
_OF_TRANSFORMERS = (
    ("pytorch_utils", "Conv1D", "conv1d_of_transformers"),
    ("models.falcon.modeling_falcon", "FalconLinear", "linear"),
    ("models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts", "experts"),
)


def layout_of(module: nn.Module, name: str, shape: torch.Size) -> WeightLayout | None:
    """How a parameter meets the input of its module; see [Note: input shape].

    Args:
        module, name: the owner of the parameter and its name there.
        shape: of the whole parameter.

    Returns:
        None if the input of the module is not what the parameter multiplies, or it cannot be known
        that it is.
    """
    is_transposed = getattr(module, "is_transposed", None)
    if len(shape) == 3 and isinstance(is_transposed, bool):
        # What transformers' use_experts_implementation says; see collecting.[Note: fused experts].
        return WeightLayout("transposed_experts" if is_transposed else "experts", tuple(shape))
    if name != "weight" or isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    for known, kind in _known_layers():
        # With a forward of its own class, it is not known what a layer multiplies.
        if isinstance(module, known) and type(module).forward is known.forward:
            groups = module.groups if isinstance(module, Convolution) else 1
            return WeightLayout(kind, tuple(shape), groups)
    return None


def _known_layers() -> Iterator[tuple[type[nn.Module], str]]:
    """Layers whose forward multiplies their weight with their input as it comes."""
    yield from ((nn.Linear, "linear"), (nn.Conv1d, "convolution"), (nn.Conv2d, "convolution"))
    for file, name, kind in _OF_TRANSFORMERS:
        loaded = sys.modules.get(f"transformers.{file}")
        if loaded is not None:
            yield getattr(loaded, name), kind


@dataclass(frozen=True)
class Part:
    """What a rank has of an input; see [Note: parts of an input].

    Attributes:
        features: which of the input's features.
        token_ranks: the ranks that have these tokens; None: a plain tensor does not tell.
        ranks: those of them that have these features of them.
    """

    features: range
    token_ranks: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None


def as_dtensor(label: str, value: Tensor, weight: DTensor, layout: WeightLayout) -> DTensor:
    """The plain input of a parallelised linear layer, as the DTensor of which it is a part.

    Args:
        label: the parameter, for messages.
        value: [..., features]: all features, the same on every rank, or those that the rank's part
            of the weight multiplies.
        weight: what is registered as the layer's weight during this call.
        layout: of the weight.

    Raises:
        NotImplementedError: a convolution; another number of features.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dim = layout.input_dim
    num_inputs, num_local = weight.shape[dim], local_tensor(weight).shape[dim]
    is_whole = value.shape[-1] == num_inputs
    if layout.kind == "convolution" or not (is_whole or value.shape[-1] == num_local):
        raise NotImplementedError(
            f"{label}: the weight is a DTensor, and which part of the input the plain tensor of "
            f"shape {tuple(value.shape)} is, is not known; expected a DTensor, as the layer gets "
            "from parallelize_module."
        )
    placements = [
        Replicate() if is_whole or placement != Shard(dim) else Shard(value.ndim - 1)
        for placement in weight.placements
    ]
    shape = torch.Size((*value.shape[:-1], num_inputs))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value.detach(), weight.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def read_input(
    label: str, value: Tensor, mask: Tensor | None, convolution: Convolution | None
) -> Iterator[tuple[Part, Tensor, Tensor | None]]:
    """This rank's part of what a layer is called with; of a convolution, in several chunks.

    Args:
        label: the parameter, for messages.
        value: the input; of a parallelised layer a DTensor.
        mask: bool [batch, tokens], True = a token; None: all are tokens.
        convolution: the layer, if it is one; then there is no mask.

    Yields:
        Which part of the input it is; rows [tokens, features]; and bool [tokens], False where a
        token does not count, or None if all count.

    Raises:
        NotImplementedError: a layout whose sums are not known.
        ValueError: a mask that does not fit.
    """
    feature_dim = value.ndim - 1 - (0 if convolution is None else len(convolution.kernel_size))
    keep = None if mask is None else _keep_of(label, value.shape, mask)
    if is_dtensor(value):
        part, local, keep = _read_dtensor(label, value, keep, feature_dim)
    else:
        part, local = Part(range(value.shape[feature_dim])), value.detach()
    if convolution is None:
        rows = local.reshape(-1, local.shape[-1])
        yield part, rows, None if keep is None else keep.reshape(-1)
        return
    if local.shape[feature_dim:] != value.shape[feature_dim:]:
        raise NotImplementedError(
            f"{label}: the input of the convolution is sharded by channels or by places; expected "
            "whole images."
        )
    for rows in _rows_of_windows(local if feature_dim else local.unsqueeze(0), convolution):
        yield replace(part, features=range(rows.shape[1])), rows, None


def _rows_of_windows(images: Tensor, layer: Convolution) -> Iterator[Tensor]:
    """Rows of the unfolded input of a convolution, for chunks of samples, at least one.

    Args:
        images: [samples, channels, *sizes].
        layer: says kernel size, stride, dilation and padding.

    Returns:
        Of each sample and position of the output a row, which the weight meets, in the order
        [channels, *kernel].
    """
    dims = len(layer.kernel_size)
    axes = zip(layer.kernel_size, layer.dilation, strict=True)
    reaches = [reach * (width - 1) for width, reach in axes]
    if layer.padding == "same":
        pairs = [(reach // 2, reach - reach // 2) for reach in reaches]
    elif layer.padding == "valid":
        pairs = [(0, 0)] * dims
    else:
        pairs = [(int(width), int(width)) for width in layer.padding]
    sides = [side for pair in reversed(pairs) for side in pair]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    # Columns are copied, as neighbouring positions are neighbours in memory: faster than rows.
    order = [1, *range(2 + dims, 2 + 2 * dims), 0, *range(2, 2 + dims)]
    num_inputs = images.shape[1] * math.prod(layer.kernel_size)
    size = images.shape[1:].numel() * math.prod(layer.kernel_size)
    for start, stop in spans(len(images), size, images.device):
        windows = functional.pad(images[start:stop], sides, mode=mode)
        for dim in range(dims):  # [samples, channels, *positions, *kernel]
            windows = windows.unfold(2 + dim, reaches[dim] + 1, layer.stride[dim])
            windows = windows[..., :: layer.dilation[dim]]
        yield windows.permute(order).reshape(num_inputs, -1).mT


def _read_dtensor(
    label: str, value: DTensor, keep: Tensor | None, feature_dim: int
) -> tuple[Part, Tensor, Tensor | None]:
    """This rank's part of an input, its values, and what it has of ``keep``."""
    from torch.distributed.tensor.placement_types import Replicate, Shard

    mesh = value.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    local = local_tensor(value).detach()
    splits = []
    # Where in the mesh ranks have the same tokens as this one, and where the same features too.
    same_tokens: list[slice | int] = [slice(None)] * mesh.ndim
    same_all = [*same_tokens]
    for axis, placement in enumerate(value.placements):
        size, place = mesh.size(axis), coordinate[axis]
        if isinstance(placement, Replicate) or size == 1:
            continue
        if not isinstance(placement, Shard):
            raise NotImplementedError(
                f"{label}: the input has the placement {placement}; expected Replicate, or Shard "
                "of its features or of its tokens. Redistribute the input before the layer."
            )
        dim = placement.dim % value.ndim
        splits.append((dim, size, place))
        same_all[axis] = place
        if dim != feature_dim:
            same_tokens[axis] = place
    coordinates = dim_coordinates(value.shape, splits)
    fits = [len(c) == size for c, size in zip(coordinates, local.shape, strict=True)]
    if not (fits[feature_dim] and (keep is None or all(fits))):
        raise NotImplementedError(
            f"{label}: which part of its input, of shape {tuple(value.shape)} with "
            f"{value.placements}, the {tuple(local.shape)} of this rank are, is not known; "
            "expected chunks as torch.chunk cuts them."
        )
    for dim, rows in enumerate(coordinates[:-1]):
        keep = None if keep is None else keep.narrow(dim, rows.start, len(rows))
    part = Part(coordinates[feature_dim], ranks_at(mesh, same_tokens), ranks_at(mesh, same_all))
    return part, local, keep


def ranks_at(mesh: DeviceMesh, where: Sequence[slice | int]) -> tuple[int, ...]:
    """The ranks at some places of a mesh, given for each of its axes; sorted."""
    return tuple(sorted(mesh.mesh[tuple(where)].flatten().tolist()))


def _keep_of(label: str, shape: torch.Size, mask: Tensor) -> Tensor:
    """The mask in the shape of the tokens of an input, [..., features]."""
    # [batch * tokens, features], or a dimension of size 1 between batch and tokens.
    squeezed = [size for size in shape[:-1] if size > 1]
    if squeezed in ([size for size in mask.shape if size > 1], [mask.numel()]):
        return mask.view(shape[:-1])
    raise ValueError(
        f"{label}: an input of shape {tuple(shape)} does not fit the attention_mask of shape "
        f"{tuple(mask.shape)}; expected [batch, tokens, features] or [batch * tokens, features]. "
        "Layers that see other tokens (experts, poolers) need batches without padding and without "
        "attention_mask, or are left out."
    )


# Elements that are converted to fp64 at a time: what stays in the cache of a core, 1 MiB; and what
# keeps an accelerator busy, 32 MiB.
_CPU_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 22
_ROWS_OF_A_PRODUCT = 256


def sums_of_rows(rows: Tensor, keep: Tensor | None = None) -> Tensor:
    """Sums over the rows of the input of a layer.

    Args:
        rows: [tokens, features], of any real floating-point dtype. Squares are those of fp64: in
            fp16 they would overflow from 256 on.
        keep: bool [tokens]; rows that are False are left out, whatever they hold.

    Returns:
        fp64 [2, features]: the sums of x, and those of x squared.

    Cost: one read; temporaries in fp64 of a chunk, 1 MiB on a CPU and 32 MiB elsewhere.
    """
    totals = torch.zeros(2, rows.shape[1], dtype=torch.float64, device=rows.device)
    for start, stop in spans(rows.shape[0], rows.shape[1], rows.device):
        chunk = rows[start:stop].to(torch.float64, copy=True)
        if keep is not None:
            chunk.masked_fill_(~keep[start:stop].unsqueeze(1), 0)
        totals[0] += chunk.sum(0)
        totals[1] += chunk.square_().sum(0)
    return totals


def product_of_rows(rows: Tensor) -> Tensor:
    """The sum of x x^T over the rows [tokens, inputs]: in fp32, or fp64 of such rows.

    Rows are multiplied a few at a time, because the rounding of a product grows with their number.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=dtype, device=rows.device)
    for chunk in torch.split(rows, _ROWS_OF_A_PRODUCT):
        values = chunk.to(dtype)
        total += values.mT @ values  # addmm may add token by token, and round as often
    return total


def spans(length: int, size: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Spans of a dimension; with ``size`` elements in each place they are chunks."""
    chunk = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // max(1, size))
    for start in range(0, length, step):
        yield start, min(start + step, length)


# Of counts, and of second sums, which kernels may add in another order.
_TOLERANCES = torch.tensor([1e-12, 1e-6], dtype=torch.float64)

Pairs = Iterable[tuple[nn.Module, str]]
S = TypeVar("S", bound="Statistics")
V = TypeVar("V")


# What was seen of a parameter, fp64, equal on all ranks: how much, [1], or [experts], of each of
# fused experts; and the first and the second of what was added up, in the shapes that a file has.
Sums = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False)
class Entry:
    """The statistics of one parameter.

    Attributes:
        label: the parameter's name.
        places: its (module, name) pairs on this rank; empty if only other ranks have it.
        layout: how it lies, and meets its inputs.
        seen: what this rank has seen of its inputs since the ranks have summed up: by part, the
            number of tokens and the sums.
        total: over all ranks, with what was loaded; None if nothing was summed up yet.
    """

    label: str
    places: tuple[tuple[nn.Module, str], ...]
    layout: WeightLayout
    seen: dict[Any, tuple[int | Tensor, Tensor]] = field(default_factory=dict)
    total: Sums | None = None

    @property
    def sums(self) -> Sums:
        """The total, which is known."""
        assert self.total is not None
        return self.total

    def add_to_total(self, new: Sums) -> None:
        """Add what the ranks have seen since the last sum."""
        if self.total is not None:
            counts, first, second = (a + b for a, b in zip(self.total, new, strict=True))
            new = counts, first, second
        self.total, self.seen = new, {}


class Statistics:
    """Statistics of some parameters, and the ranks that have them together."""

    _mode: str
    _OF_GRADIENTS: ClassVar[bool]
    _NOT_FINITE: ClassVar[str]  # what is wrong with sums that are not, and with ranks that differ
    _UNEQUAL: ClassVar[str]

    def _read(
        self,
        communicator: Communicator,
        arguments: Callable[[], ParameterArguments],
        layout_of: Callable[[Shard, nn.Module, str], WeightLayout],
    ) -> None:
        """Read the parameters. Collective.

        Args:
            communicator: all ranks that take part.
            arguments: makes the arguments of the caller.
            layout_of: of a parameter at one of its places; raises if it is not known.
        """
        self._communicator = communicator
        with communicator.exclusively():
            self._arguments, shards = read_parameters(arguments, communicator)
            layouts = _agreed_layouts(shards, layout_of, communicator)
        self._local = [Entry(s.name, s.places, layouts[s.name]) for s in shards]
        self._is_named = all(shard.is_named or not shard.places for shard in shards)

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs of this rank that have statistics, under all their names."""
        return [place for parameter in self._local for place in parameter.places]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to one small safetensors file. Collective; the first rank writes.

        It has the sums over all ranks of the whole weights, by full names: any run on any sharding
        can load it. The form is in files.statistics_file.[Note: statistics file]. An
        existing file is replaced at the end, or stays as it was.

        Raises:
            ValueError: as :meth:`totals`; parameters without full names.
            RuntimeError: as :meth:`totals`.
            OutputError: of distprune.files.errors, the file cannot be written; a RuntimeError on
                the other ranks.

        Cost: as :meth:`totals`; 8 bytes for each number of the sums on disk.
        """
        stored = self._stored(self._asked(None))

        def write() -> None:
            self._check_names()
            if self._communicator.index == 0:
                write_statistics(path, self._mode, stored)

        with self._communicator.exclusively():
            self._communicator.run(write)

    @classmethod
    def load(cls: type[S], path: str | os.PathLike[str], parameters: Pairs, **options: Any) -> S:
        """Statistics of a file that :meth:`save` wrote, for any sharding. Collective.

        Args:
            path: of the file; every rank reads it.
            parameters: as for the class. The file may have statistics of more parameters.
            options: keywords of the class.

        Raises:
            CheckpointError: of distprune.files.errors, no such file, or a malformed one.
            ValueError: a parameter that the file does not have, or that has another shape; ranks
                that read different files.
            NotImplementedError: as the class.

        Cost: a read of the file; all-reduces of some hundred bytes.
        """
        make: Any = cls
        made: S = make(parameters, **options)

        def read() -> tuple[str, list[StoredStatistics]]:
            made._check_names()
            mode, stored = read_statistics(path, cls._OF_GRADIENTS)
            return mode, [_fitting(p, stored, os.fspath(path)) for p in made._local]

        def facts(_: object) -> list[tuple[str, str]]:
            return [("statistics to load", hashlib.sha256(Path(path).read_bytes()).hexdigest())]

        with made._communicator.exclusively():
            made._mode, found = made._communicator.run(read, facts)
        for parameter, stored in zip(made._local, found, strict=True):
            parameter.total = _sums_of(stored)
        return made

    def _stored(self, parameters: Iterable[Entry]) -> dict[str, StoredStatistics]:
        """The statistics of parameters by name, as a file has them."""
        stored = {}
        for p in parameters:
            first, second = (sums.numpy() for sums in p.sums[1:])
            facts = p.layout, self._count(p), first, second, self._OF_GRADIENTS
            stored[p.label] = StoredStatistics(*facts)
        return stored

    def _count(self, parameter: Entry) -> Any:
        """How much was seen, as a file has it."""
        raise NotImplementedError

    def _shapes(self, layout: WeightLayout) -> tuple[tuple[int, ...], ...]:
        """The shapes of the sums of a parameter."""
        raise NotImplementedError

    def _check_ready(self) -> None:
        """Raise RuntimeError if sums cannot be asked for on this rank."""

    def _sum(self, parameters: Sequence[Entry]) -> None:
        """Sum up what is new of some parameters. Collective."""

    def _asked(self, parameters: Pairs | None) -> list[Entry]:
        """The parameters that any rank asks for; sums up what is new of them. Collective."""

        def flags() -> Tensor:
            self._check_ready()
            asked = set(self._entries_of(parameters))
            rows = [(p in asked, bool(p.seen) or p.total is None) for p in self._local]
            return torch.tensor(rows, dtype=torch.int64).view(-1)

        communicator = self._communicator
        with communicator.exclusively():
            rows = communicator.max(communicator.run(flags)).view(-1, 2).tolist()
            pairs = list(zip(self._local, rows, strict=True))
            new = [parameter for parameter, (is_asked, is_new) in pairs if is_asked and is_new]
            if new:
                self._sum(new)
        return [parameter for parameter, (is_asked, _) in pairs if is_asked]

    def _sum_over_ranks(
        self, parameters: Sequence[Entry], pack: Callable[[], list[Tensor]]
    ) -> list[Sums]:
        """Sum one vector for each parameter over all ranks. Collective.

        Args:
            parameters: the same on every rank.
            pack: a local step that makes the vectors of this rank, fp64: two numbers, whose sums
                are 0 if ranks with the same data have seen as much, and have the same second sums;
                then counts, first and second sums.

        Raises:
            ValueError: sums that are not finite; ranks with the same data that differ. On every
                rank.

        Cost: one all-reduce of 8 bytes per element.
        """
        shapes = [((2,), *self._shapes(parameter.layout)) for parameter in parameters]
        sizes = [math.prod(shape) for of_one in shapes for shape in of_one]
        total = self._communicator.reduce_floats(sum(sizes), lambda: torch.cat(pack()))
        parts = iter(torch.split(total, sizes))
        found = []
        for parameter, of_one in zip(parameters, shapes, strict=True):
            received = [next(parts).reshape(shape).clone() for shape in of_one]
            differences, counts, first, second = received
            if not all(bool(part.isfinite().all()) for part in received):
                raise ValueError(f"{parameter.label}: {self._NOT_FINITE}")
            allowed = torch.stack([counts.sum(), second.sum()]) * _TOLERANCES
            if bool((differences.abs() > allowed).any()):
                raise ValueError(f"{parameter.label}: {self._UNEQUAL}")
            found.append((counts, first, second))
        return found

    def _by_pair(
        self, parameters: Sequence[Entry], value: Callable[[Entry], V]
    ) -> dict[NamedParameter, V]:
        """A value of each parameter that this rank has, by (module, name)."""
        return {NamedParameter(*p.places[0], p.label): value(p) for p in parameters if p.places}

    def _scores(
        self, parameters: Sequence[Entry], make: Callable[[Entry], FactoredScores]
    ) -> dict[NamedParameter, FactoredScores]:
        """The scores of parameters; the first rank warns of matrices that saw nothing."""
        return self._by_pair(self._without_empty(parameters), make)

    def _without_empty(self, parameters: Sequence[Entry]) -> list[Entry]:
        """Parameters whose empty matrices have the means of their siblings."""
        stored = self._stored(parameters)
        filled, warning = scored_as_siblings(stored)
        if warning is None:
            return list(parameters)
        if self._communicator.index == 0:
            warnings.warn(warning, stacklevel=4)
        return [replace(p, total=_sums_of(filled[p.label])) for p in parameters]

    def _shards(self) -> list[Shard]:
        """The parameters as they are now, in the order of the statistics. Collective."""
        return read_parameters(lambda: self._arguments, self._communicator)[1]

    def _entries_of(self, parameters: Pairs | None) -> list[Entry]:
        if parameters is None:
            return self._local
        known = {(id(module), name): p for p in self._local for module, name in p.places}
        try:
            return [known[id(unwrap(module)), name] for module, name in parameters]
        except KeyError:
            text = "a (module, name) pair is none of the parameters of these statistics"
            raise ValueError(f"{text}; expected pairs that they were made with.") from None

    def _check_names(self) -> None:
        if not self._is_named:
            text = "parameters have no full names, by which statistics are stored"
            raise ValueError(f"{text}; expected pairs as select(model) lists them.")


def _sums_of(stored: StoredStatistics) -> Sums:
    counts = torch.tensor(stored.count, dtype=torch.float64).view(-1)
    return counts, torch.from_numpy(stored.first), torch.from_numpy(stored.second)


def difference_of(value: float, ranks: Sequence[int], rank: int) -> float:
    """What this rank adds to a sum that is 0 if ``value`` is equal on all of ``ranks``."""
    return value * (len(ranks) - 1) if rank == ranks[0] else -value


def peers_of(of_layers: Collection[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    """The ranks that run the model on the same data as this one, itself included.

    Args:
        of_layers: the ranks with the same data, as each layer tells.
        rank: this one.

    Returns:
        The most ranks of a layer, if those of all others are among them; else this rank alone.
    """
    largest = max(of_layers, key=len, default=(rank,))
    if rank not in largest or not all(set(ranks) <= set(largest) for ranks in of_layers):
        return (rank,)
    return largest


def _agreed_layouts(
    shards: Sequence[Shard],
    layout_of: Callable[[Shard, nn.Module, str], WeightLayout],
    communicator: Communicator,
) -> dict[str, WeightLayout]:
    """The layouts of all parameters by label, also of those that only other ranks have.

    Cost: two all-reduces, of 16 bytes per rank, and of about 100 bytes per parameter.
    """

    def describe() -> str:
        described = {}
        for shard in shards:
            layouts = {layout_of(shard, module, name) for module, name in shard.places}
            if len(layouts) > 1:
                raise NotImplementedError(
                    f"{shard.name} is tied between layers that use it differently; expected "
                    "layers of one kind."
                )
            for layout in layouts:
                described[shard.name] = layout.kind, layout.shape, layout.groups
        return json.dumps(described)

    texts, _ = communicator.distinct_texts(communicator.run(describe))
    return {
        label: WeightLayout(kind, tuple(shape), groups)
        for text in texts
        for label, (kind, shape, groups) in json.loads(text).items()
    }


def _fitting(
    parameter: Entry, stored: Mapping[str, StoredStatistics], where: str
) -> StoredStatistics:
    """The stored statistics of a parameter; ValueError if missing, or those of another weight."""
    label, layout = parameter.label, parameter.layout
    if label not in stored:
        raise ValueError(
            f"{where} has no statistics of {label}; it has those of {listed(stored, 3)}."
        )
    if stored[label].layout != layout:
        raise ValueError(
            f"{label}: {where} has statistics of a {stored[label].layout}; expected {layout}."
        )
    return stored[label]
