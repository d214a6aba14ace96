"""Shrink a language model in a folder, one decoder layer in memory at a time.

    experts    forward (what tokens say of each)                             --> values --> DST
    neurons    forward --> backward (Fisher by factors) --> update (in turn) --> values --> DST

What a layer loses, and how the neurons that stay take over, is computed by
``language_models.shrinking``, as of a model in memory. Layers are written without what they lose
when they are run for the last time; the destination is made of these files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distprune._transformers import as_stored, tensors_to_save
from distprune.files import disk
from distprune.files.checkpoint import Checkpoint, open_checkpoint
from distprune.files.errors import OutputError, SelectionError
from distprune.files.ranked import factored_of
from distprune.files.statistics_file import StoredStatistics, read_statistics, scored_as_siblings
from distprune.language_models import shrinking
from distprune.language_models.folders import require_extra, write_folder
from distprune.language_models.running import Report, check_run
from distprune.language_models.shrinking import Factors, Layer, Plan, ShrinkReport, ShrunkLayer
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import world
from distprune.reconstruction import DAMPING
from distprune.statistics.gradients import GradientStatistics
from distprune.statistics.gram import GramMatrices
from distprune.streaming import pruning
from distprune.streaming.layers import StreamedModel
from distprune.streaming.passes import LayerPasses, TextSettings, write_tensors
from distprune.streaming.windows import WindowStream
from distprune.streaming.work import Work, digest_of

RECORD_FILE = f"{disk.SIDECAR}/shrunk.json"  # of a result


def shrink_folder(
    source: str | Path,
    destination: str | Path,
    windows: TokenWindows | None = None,
    *,
    neurons: float = 0.0,
    experts: float = 0.0,
    round_to: int = 128,
    own_text: pruning.OwnText | None = None,
    update: bool = True,
    damping: float = DAMPING,
    unseen_first: bool = False,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Report | None = None,
    tell: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Take neurons or experts out of the model in a folder. Collective over all ranks.

    The result is what ``language_models.shrink`` makes of the model, saved by ``save_sharded``, and
    ``distprune/shrunk.json`` with the report. The model may be larger than memory: one decoder
    layer at a time is read, run on all windows, and freed. The ranks share the windows, and each
    reads every layer; the first one writes.

    A run that was killed goes on at the layer where it was. Any number of ranks writes the same
    bytes, with as many threads each.

    Args:
        source, destination, batch_size, dtype, device: as for :func:`prune_folder`.
        windows: as for ``language_models.shrink``; also None if there is ``own_text`` only.
        neurons, experts: as for ``language_models.shrink``, one of them.
        round_to, update, damping, unseen_first: as for ``language_models.shrink``.
        own_text: as for :func:`prune_folder`.
        progress: called after every layer.
        tell: called with what a user may want to know, such as that a run goes on.

    Returns:
        The report, the same on every rank.

    Raises:
        SelectionError: neurons and experts.
        NotImplementedError: a model that is no chain of decoder layers, which
            ``language_models.shrink`` can take; as that function. Before weights are read.
        ValueError: as ``language_models.shrink``; weights that are not finite in their dtype.
        OutputError: the disk has no room for all files, which is checked before; the destination is
            taken. What is done so far stays for the next run. Each on every rank.

    Cost: as ``language_models.shrink``, and a read of the checkpoint for each pass over the layers.
    Memory: one layer, with its gradients, or with the Gram matrix of its neurons and the solver's
    copies; or embedding and head; and one batch. The result is made of mapped files, of which
    memory holds as much as there is room for. Disk: tokens x width x (layers + 3) elements, and
    the result once more, which are removed at the end.
    """
    require_extra()
    communicator, say = world(), tell or (lambda text: None)
    shares: Any = {"neurons": neurons, "experts": experts, "round_to": round_to}
    where, updates = torch.device(device or "cpu"), "least_squares" if update else "none"
    how: Any = (None, updates, damping, batch_size, dtype, where, progress)
    settings = TextSettings(windows or pruning.any_text(0, 1), *how)
    has_text, files = windows is not None or own_text is not None, dict[str, bytes]()

    def check(target: Path, checkpoint: Checkpoint) -> tuple[StreamedModel, Plan]:
        disk.check_destination(target, ())
        streamed = StreamedModel(source, dtype, where)
        if windows is not None:
            check_run(streamed.model, windows.tokens, batch_size)
        return streamed, _plan(streamed, has_text, **shares)

    if own_text is not None:
        own, saved = pruning.own_text_of(source, destination, own_text, settings, check)
        files[pruning.OWN_TEXT_FILE] = saved
        settings = dataclasses.replace(settings, windows=own if windows is None else windows + own)

    def begin() -> tuple[Path, dict[str, Any], ShrinkReport | ShrinkPasses]:
        checkpoint = open_checkpoint(source)
        target = disk.resolve_destination(destination, checkpoint.root)
        facts = settings.facts(checkpoint) | shares | {"unseen_first": unseen_first}
        made = _finished(target, digest_of(facts))
        if made is not None:
            return target, facts, made
        streamed, plan = check(target, checkpoint)
        stored = streamed if dtype is None else StreamedModel(source, None, where)
        small = _without_weights(stored, plan)
        work = Work(target, facts, communicator)
        work.check()
        passes = ShrinkPasses(streamed, settings, work, plan, small, unseen_first)
        return target, facts, passes

    target, facts, passes = communicator.run(
        begin, lambda found: [("text, options and model", digest_of(found[1]))]
    )
    if isinstance(passes, ShrinkReport):
        say(f"{target} is finished: this command made it before. Nothing was changed.")
        Work(target, facts, communicator).remove()
        return passes
    num_bytes = passes.streamed.checkpoint.num_bytes
    num_needed = pruning.bytes_of_states(passes.streamed, settings) + 2 * num_bytes
    with passes.work.begun(num_needed, say):
        report = passes.run()
    record = {"digest": digest_of(facts), "report": asdict(report)}
    files[RECORD_FILE] = json.dumps(record, indent=1).encode()
    write_folder(target, source, num_bytes, partial(passes.save, files))
    passes.work.remove()
    return report


@dataclass(frozen=True)
class ShrinkSizes:
    """What :func:`shrink_folder` leaves of a model.

    Attributes:
        kind: "neurons" or "experts".
        num_layers: that lose some.
        kept, total: of each of these layers.
        parameters_before, parameters_after: elements of all parameters.
        bytes_before, bytes_after: of the tensors that are stored.
    """

    kind: str
    num_layers: int
    kept: int
    total: int
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int


def sizes_of_shrunk(
    source: str | Path, *, neurons: float = 0.0, experts: float = 0.0, round_to: int = 128
) -> ShrinkSizes:
    """What :func:`shrink_folder` would leave of a model. Local; reads headers alone.

    Args:
        source, neurons, experts, round_to: as for :func:`shrink_folder`.

    Raises: as :func:`shrink_folder`, where it does not depend on weights or text.

    Cost: builds the model without weights; some seconds.
    """
    require_extra()
    streamed = StreamedModel(source, None, torch.device("cpu"))
    plan = _plan(streamed, True, neurons=neurons, experts=experts, round_to=round_to)
    models, layer = (streamed.model, _without_weights(streamed, plan)), plan.layers[0]
    elements = [model.num_parameters() for model in models]
    stored = [sum(tensor.nbytes for tensor in tensors_to_save(model).values()) for model in models]
    return ShrinkSizes(plan.kind, len(plan.layers), layer.kept, layer.total, *elements, *stored)


def _plan(streamed: StreamedModel, has_text: bool, **shares: Any) -> Plan:
    """What is cut: neurons or experts."""
    plan, *others = shrinking.plans_of(streamed.model, has_text, **shares)
    if others:
        raise SelectionError(
            f"neurons={shares['neurons']}, experts={shares['experts']}; expected one of them. Take "
            "experts out first, and neurons out of the result."
        )
    return plan


def _without_weights(stored: StreamedModel, plan: Plan) -> Any:
    """The smaller model, without weights, in the dtypes of the checkpoint."""
    return shrinking.cut(stored.model, plan, [torch.arange(layer.kept) for layer in plan.layers])


def _finished(target: Path, digest: str) -> ShrinkReport | None:
    """The report of the destination, if this command has made it."""
    try:
        found = json.loads((target / RECORD_FILE).read_text())
    except (OSError, ValueError):
        return None
    return _report_of(**found["report"]) if found["digest"] == digest else None


def _report_of(layers: list[dict[str, Any]], **sizes: int) -> ShrinkReport:
    """A report, from what ``asdict`` makes of one."""
    lists = ("removed", "unseen")
    rows = [ShrunkLayer(**row | {name: tuple(row[name]) for name in lists}) for row in layers]
    return ShrinkReport(tuple(rows), **sizes)


@dataclass(frozen=True)
class ShrinkPasses(LayerPasses):
    """Everything that takes neurons, or experts, out of a model in a folder.

    Args:
        streamed, settings, work: as for LayerPasses. Without windows neurons go by magnitude.
        plan: what is cut.
        small: the smaller model without weights, in the dtypes of the checkpoint.
        unseen_first: as for ``language_models.shrink``.
    """

    plan: Plan
    small: Any
    unseen_first: bool

    @cached_property
    def layers(self) -> dict[int, Layer]:
        """Those that lose some, by number."""
        module_of, layers = self.streamed.model.get_submodule, self.streamed.layers
        return {layers.index(module_of(layer.name)): layer for layer in self.plan.layers}

    def run(self) -> ShrinkReport:
        """Run the text, and write each layer without what it loses. Collective."""
        numbers = range(len(self.streamed.layers))
        if self.plan.kind == "experts":
            finished = self._finished("shrink", {"forward": numbers})
            self._without_experts(self._layers(finished, "forward", numbers))
        else:
            self._without_neurons(numbers)
        with self.streamed.around():
            self.work.once("around", partial(self._write, -1))
        rows = [self.work.get("rows")[layer.name] for layer in self.plan.layers]
        before, after = (model.num_parameters() for model in (self.streamed.model, self.small))
        return _report_of(rows, parameters_before=before, parameters_after=after)

    def save(self, files: Mapping[str, bytes], folder: Path) -> None:
        """Write weights, configuration, and small files. Collective."""
        values = [self.work.file("values", n) for n in range(-1, len(self.streamed.layers))]

        def write() -> None:
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            found = {name: tensor for file in values for name, tensor in load_file(file).items()}
            stored = {name: found[name] for name in as_stored(self.small, self._saved)}
            how: Any = {"save_original_format": False, "max_shard_size": "5GB"}
            try:
                self.small.save_pretrained(folder, state_dict=stored, **how)
            except SafetensorError as error:
                raise OutputError(f"{folder} cannot be written: {error}.") from error
            for name, data in files.items():
                disk.write_atomically(folder / name, data)

        self.work.on_first_rank(write)

    def _without_experts(self, layers: Iterator[int]) -> None:
        """Write layers without the experts that are worth least. Collective."""
        stream, model = self._stream("dense", self.settings.windows), self.streamed.model
        ranks = self.work.communicator
        for number in layers:
            if number in self.layers:
                layer = self.layers[number]
                sums = torch.zeros(2, layer.total, dtype=torch.float64)
                with shrinking.counting_tokens(model, layer, sums):
                    ranks.run(partial(stream.advance, number))
                sums = ranks.reduce_floats(sums.numel(), sums.flatten).view_as(sums)
                (worth,) = shrinking.worths_of_experts(sums[None], self.unseen_first)
                self._keep_best(number, worth, sums=[sums])
            else:
                ranks.run(partial(stream.advance, number))
                self._write(number)
            stream.remove("state", number - 1)

    def _without_neurons(self, numbers: Sequence[int]) -> None:
        """Write layers without the neurons that are worth least; let the others take over."""
        settings, model = self.settings, self.streamed.model
        first, last = min(self.layers), max(self.layers)
        passes = {str(settings.update): numbers}
        if len(settings.windows):
            passes |= {"forward": numbers, "backward": numbers[first:][::-1]}
        layers = partial(self._layers, self._finished("shrink", passes))
        factors: Factors = {}
        stream = None
        if len(settings.windows):
            dense = self._stream("dense", settings.windows)
            for number in layers("forward", numbers):
                dense.advance(number)
            self.work.once("head", lambda: self.work.communicator.run(dense.differentiate))
            for number in layers("backward", passes["backward"]):
                layer = self.layers.get(number)
                pairs = shrinking.weights_of_neurons(model, layer) if layer else []
                for module, name in pairs:
                    module.get_parameter(name).requires_grad_(True)
                statistics = [GradientStatistics(pairs)] if pairs else []
                dense.differentiate_layer(number, statistics)
                for each in statistics:
                    each.save(self.work.file("statistics", number))
                dense.remove("gradient", number + 2)
            factors = self.work.communicator.run(self._factors)
            if settings.moves:
                stream = self._stream("after", settings.windows)

        for number in layers(settings.update, numbers):
            if number in self.layers:
                find = partial(shrinking.worth_of_neurons, model, self.layers[number], factors)
                self._keep_best(number, self.work.communicator.run(find), stream)
            else:
                self._write(number)
            if stream is not None and number < last:
                stream.move_on(number)

    def _move(self, stream: WindowStream, number: int, stay: Tensor) -> list[float]:
        """Let the neurons of a layer that stay take over; as ``move_columns``. Collective."""
        model, layer = self.streamed.model, self.layers[number]
        pair = shrinking.pair_of(model, layer.inner)
        grams, dtype = GramMatrices([pair]), self.small.get_parameter(layer.inner).dtype
        stream.collect(number, grams)
        gram, damping = grams.matrix(*pair), self.settings.damping
        return shrinking.move_columns(model, layer, stay, gram, damping, dtype)

    def _keep_best(
        self,
        number: int,
        worth: Tensor,
        stream: WindowStream | None = None,
        sums: Sequence[Tensor] = (),
    ) -> None:
        """Write a layer without what is worth least. Collective.

        Args:
            worth: of each neuron or expert.
            stream: for the neurons that stay, to take over; None: they do not.
            sums: as for ``rows_of``.
        """
        plan = self.plan._replace(layers=[self.layers[number]])
        (stay,) = shrinking.best(plan, [worth])
        errors = [] if stream is None else [self._move(stream, number, stay)]
        (row,) = shrinking.rows_of(plan, [stay], errors, sums)
        self._write(number, stay)
        self.work.record("rows", self.work.get("rows", {}) | {row.name: asdict(row)})

    def _factors(self) -> Factors:
        """Of the weights of neurons, from the files of all layers."""
        stored: dict[str, StoredStatistics] = {}
        for number in self.layers:
            stored |= read_statistics(self.work.file("statistics", number), True)[1]
        filled, _ = scored_as_siblings(stored)
        return {name: factored_of(each, "fisher", ()).terms[0] for name, each in filled.items()}

    @cached_property
    def _saved(self) -> dict[str, Tensor]:
        """The tensors of the result, without values, by their names in the model."""
        return tensors_to_save(self.small)

    def _write(self, number: int, stay: Tensor | None = None) -> None:
        """Write what stays of a layer, or what is around all (-1), which is in memory. Collective.

        As ``save_pretrained``, in the dtypes of the checkpoint.
        """

        def write() -> None:
            names = [n for names, _ in self.streamed.sources[number] for n in names]
            state, tensors = self.streamed.model.state_dict(), dict[str, Tensor]()
            for name in filter(self._saved.__contains__, names):
                tensor = state[name]
                if stay is not None and name in self.layers[number].dims:
                    tensor = shrinking.cut_tensor(self.layers[number], stay, name, tensor)
                tensors[name] = tensor.to("cpu", self._saved[name].dtype)
            write_tensors(self.work.file("values", number), as_stored(self.small, tensors))

        self.work.on_first_rank(write)
