"""Prune a language model in a folder by text, one decoder layer in memory at a time.

text --> forward  --> backward --> ranking  --> update --> DST
         (hidden      (scores by   (of the      (least     (files.pruning)
          states)      factors)     stored       squares)
                                    weights)      |   ^
                                                  v   |
                                                 polish  (the whole model in memory)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distprune.files.checkpoint import Checkpoint, open_checkpoint
from distprune.files.disk import SIDECAR, check_destination, resolve_destination, writing
from distprune.files.errors import CheckpointError, SelectionError
from distprune.files.planning import STATISTICS_FILE, check_scores, plan, source_facts
from distprune.files.pruning import prune as prune_files
from distprune.files.reports import Report, read_report
from distprune.language_models.folders import load_sharded, require_extra
from distprune.language_models.losses import SLICE
from distprune.language_models.running import Report as ReportProgress
from distprune.language_models.running import check_run
from distprune.language_models.text import TokenWindows, origin_of, read_windows
from distprune.language_models.writing import OWN_TEXT, WRITTEN, write_text
from distprune.ranks.collectives import world
from distprune.recipes import ELEMENTWISE, Recipe
from distprune.reconstruction import DAMPING
from distprune.statistics.parameters import layout_of
from distprune.streaming.layers import StoredLayers, StreamedModel
from distprune.streaming.passes import Passes, Settings, TextSettings, Update
from distprune.streaming.work import Work, digest_of

OWN_TEXT_FILE = f"{SIDECAR}/own_text.safetensors"  # of a result
# What Python, torch, transformers, a large tokenizer and the solver's temporaries take.
_BASE = 900_000_000
# Of a weight that has a score of its own: a sum, the score, and what both are made of.
_BYTES_OF_SCORES = 3 * torch.float32.itemsize


@dataclass(frozen=True)
class StreamCost:
    """What a pruning by text needs on each process, at most.

    Attributes:
        memory: bytes of each pass, by its name; where the passes run on a device, of its memory.
        disk: bytes of the folder of work, which is removed at the end, of all processes together.
        reads: bytes of the checkpoint that each process reads to run text through layers.
    """

    memory: dict[str, int]
    disk: int
    reads: int

    @property
    def peak(self) -> int:
        """Bytes of the pass that needs most."""
        return max(self.memory.values())


def cost_of(
    streamed: StreamedModel, stored: StoredLayers, settings: Settings, own_text: bool
) -> StreamCost:
    """Estimate what a pruning needs.

    Args:
        streamed: the model.
        stored: its layers, as they lie in the checkpoint.
        settings: of the pruning.
        own_text: whether the model writes text first.

    Cost: walks over the modules.
    """
    config, item = streamed.model.config.get_text_config(), streamed.model.dtype.itemsize
    length = settings.windows.length
    tokens, width = settings.batch_size * length, config.hidden_size * item
    num_layers = len(streamed.layers)
    layers = [streamed.num_bytes(number) for number in range(num_layers)]
    weights: list[list[Tensor]] = [
        [module.get_parameter(name) for module, name in pairs] for pairs in stored.parameters
    ]
    pruned = [sum(weight.numel() for weight in of_layer) for of_layer in weights]
    # What matrices take and return, and attention where the implementation makes its matrices.
    features = max(
        sum(sum(p.shape[-2:]) for p in layer.parameters() if p.ndim > 1)
        for layer in streamed.layers
    )
    heads = getattr(config, "num_attention_heads", 1)
    activations = tokens * (features * item + 4 * width) + tokens * length * heads * item
    around, logits = streamed.num_bytes(-1), 3 * 4 * min(tokens * config.vocab_size, SLICE)
    memory = {
        "embedding and head": around + logits + 4 * tokens * width,
        "forward": max(layers) + activations,
    }
    if "backward" in settings.passes:
        of_weight = item + _BYTES_OF_SCORES * len(settings.elementwise)
        sizes = zip(layers, pruned, strict=True)
        memory["backward"] = 2 * activations + max(size + n * of_weight for size, n in sizes)
    if settings.moves:
        updates = map(_bytes_of_update, weights)
        sizes = zip(layers, updates, strict=True)
        memory["update"] = activations + max(size + update for size, update in sizes)
    if settings.update == "training":
        sizes = zip(layers, pruned, strict=True)
        memory["training"] = 4 * activations + max(size + 20 * n for size, n in sizes)
    whole = sum(map(streamed.num_bytes, range(-1, num_layers))) // item
    if own_text:
        memory["own text"] = bytes_of_own_text(streamed, length)
    if settings.polish:
        # Trained weights, masks, products and gradients, with their squares, and what is of 16
        # bits once more in fp32 with its gradients, are as large in either dtype.
        trained, size = sum(pruned), 2 if streamed.model.dtype == torch.bfloat16 else 4
        weights_of_all = size * (whole - trained) + 20 * trained
        memory["polish"] = weights_of_all + logits + 4 * num_layers * activations
    disk = bytes_of_states(streamed, settings)
    disk += sum(pruned) * item if settings.moves else 0
    disk += sum(pruned) * (item + 16) if settings.polish else 0  # two states, for a moment
    disk += stored.num_scored(settings.elementwise) * torch.float32.itemsize
    num_passes = len(settings.passes) - ("none" in settings.passes)
    reads = num_passes * sum(layers) + 2 * around
    return StreamCost({name: size + _BASE for name, size in memory.items()}, disk, reads)


def bytes_of_own_text(streamed: StreamedModel, length: int) -> int:
    """The memory of weights, of logits, and of keys and values of a batch."""
    config, num_layers = streamed.model.config.get_text_config(), len(streamed.layers)
    states = 2 * num_layers * length * config.hidden_size * streamed.model.dtype.itemsize
    weights = sum(map(streamed.num_bytes, range(-1, num_layers)))
    return weights + int(WRITTEN * (20 * config.vocab_size + states))


def memory_of_own_text(source: str | Path, length: int, dtype: torch.dtype | None = None) -> int:
    """Bytes of memory that a process needs for the model of a folder to write text.

    Args:
        source, dtype: as for :func:`prune_folder`.
        length: tokens of a window.

    Raises: as :func:`prune_folder`, for what the headers show.
    """
    require_extra()
    return _BASE + bytes_of_own_text(StreamedModel(source, dtype, torch.device("cpu")), length)


def bytes_of_states(streamed: StreamedModel, settings: TextSettings) -> int:
    """What hidden states and gradients take of the disk, at most."""
    num_evaluated = 0 if settings.evaluation is None else len(settings.evaluation)
    num_stages = len(streamed.layers) + 3 + 3 * (settings.update == "training")
    num_states = len(settings.windows) * num_stages + 4 * num_evaluated
    config, item = streamed.model.config.get_text_config(), streamed.model.dtype.itemsize
    size: int = num_states * settings.windows.length * config.hidden_size * item
    return size


def _bytes_of_update(weights: list[Tensor]) -> int:
    """Masks, new weights and what undoes them, Gram matrices, and two in fp64."""
    inputs = [(max(w.shape[-2:]), len(w)) if w.ndim == 3 else (w.shape[-1], 1) for w in weights]
    grams = sum(8 * size**2 * number for size, number in inputs)
    solver = max((8 * size**2 for size, _ in inputs), default=0)
    return grams + 2 * solver + sum(w.numel() + 3 * w.nbytes for w in weights)


@dataclass(frozen=True)
class OwnText:
    """Text that a model is to write; see ``language_models.write_text``."""

    tokenizer: Any
    windows: int
    length: int
    seed: int = 0


@dataclass(frozen=True)
class PrunedFolder:
    """What :func:`prune_folder` has done; the same on every rank.

    Attributes:
        report: of the pruning.
        before, after: the perplexity of the evaluation text; None: there was none.
        errors: by parameter, the relative error of its layer's outputs before and after the
            update.
    """

    report: Report
    before: float | None
    after: float | None
    errors: Mapping[str, tuple[float, float]]


def prune_folder(
    source: str | Path,
    destination: str | Path,
    recipe: Recipe,
    windows: TokenWindows | None = None,
    *,
    own_text: OwnText | None = None,
    update: Update = "least_squares",
    damping: float = DAMPING,
    polish: int = 0,
    evaluation: TokenWindows | None = None,
    rounds: Sequence[float] = (),
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: ReportProgress | None = None,
    keep_scores: str | Path | None = None,
    replace: bool = False,
    tell: Callable[[str], None] | None = None,
) -> PrunedFolder:
    """Prune the decoder in a Hugging Face folder by text. Collective over all ranks.

    The model may be larger than memory: one decoder layer at a time is read, run on all windows,
    and freed. Hidden states are files in a folder beside the destination. The ranks share the
    windows, and each reads every layer.

    1. A forward through all layers. Scores "wanda", "stade" and "ria" get their statistics here.
    2. For scores of gradients a backward, layer by layer. For "fisher" it adds up squared gradients
       by output and by input: 16 bytes for each, and nothing of the size of a weight. For "taylor"
       and "elementwise_fisher" it writes the score of each weight to a file.
    3. ``files.pruning`` ranks the stored weights by these, as it does for a file of statistics or a
       folder of scores.
    4. For each layer: the Gram matrices of the inputs that it has in the dense model, and least
       squares for its kept weights (``distprune.reconstruct``). With update "training" also some
       steps of RMSprop, for the layer to return what it does in the dense model, of the inputs that
       the pruned layers before it give.
    5. With ``polish``, the whole model is trained for some steps towards the predictions of the
       dense one, with the zeros held (``language_models.polish``).
    6. ``files.pruning`` writes the destination: what it writes without text, but for the kept
       values of pruned tensors.

    A run that was killed goes on at the layer where it was, and ends with the same bytes, on the
    same number of ranks.

    Args:
        source: a folder with config.json and safetensors files, or the name of a model in the
            local Hugging Face cache.
        destination: a free name, in a folder that all ranks see.
        recipe: what to prune. Score "fisher" or one of activations, without ``statistics``, and
            "taylor" and "elementwise_fisher", without ``scores``, are computed from the windows;
            any other is taken as it is.
        windows: text from which scores, update and polishing learn, as much of each source; the
            same on every rank. None: only ``own_text``.
        own_text: text that the model is to write first, which needs the whole model in memory on
            every rank. It is kept, and a result has it as ``distprune/own_text.safetensors``: runs
            that find it there, or in what a killed run left, use the same one.
        update: "least_squares"; "training", which follows it; or "none": kept weights stay what
            they are.
        damping: as for ``reconstruct``.
        polish: steps of the polishing; it needs the whole model in memory on every rank, and
            :func:`estimate` says how much.
        evaluation: held-out text; its perplexity before and after comes into the report.
        rounds: sparsities below that of the recipe, rising: the model is pruned to each of them
            first, with scores and an update of the model that the round before left. For "fisher"
            the sums of gradients stay those of the dense model: what is pruned has no gradient, so
            that a row which lost much would seem to matter little. Else each round costs as much as
            the whole; and for a while a copy of the model on the disk.
        batch_size: windows that a rank runs at a time.
        dtype: in which the model computes; None: that of the config. Values are stored in the dtype
            of the source.
        device: where it computes; by default the CPU.
        progress: called after every layer, and as for ``files.pruning.prune``.
        replace, tell: as for ``files.pruning.prune``.
        keep_scores: a free name for a folder, which gets the scores of single weights and stays:
            ``verify`` needs them, and other recipes can rank by them.

    Returns:
        The report, and what was measured.

    Raises:
        NotImplementedError: a model that is no chain of decoder layers; as ``load_sharded``.
        SelectionError: a tensor outside of the decoder layers is to be pruned; nothing says where
            given scores are.
        ValueError: a loss that is not finite; tokens that the model does not have.
        OutputError: the disk has no room for all files, which is checked before; the destination is
            taken.
        FilesError: of any other kind, as ``files.pruning.prune``. Each on every rank.

    Cost: per window a forward for the hidden states, a forward and a backward for scores of
    gradients, and a forward for the update; for training as much as 13 forwards. Memory: one
    layer, for scores of gradients with these (and 12 bytes for each weight that has a score of its
    own), for the update with its Gram matrices (8 bytes x inputs**2 for each different input) and
    the solver's copies of one matrix, for training with 20 bytes for each weight; or embedding and
    head; and one batch. Disk: tokens x width x (layers + 3) elements, for training + 6, for the
    update a copy of the pruned tensors, and 4 bytes for each weight that has a
    score of its own; all are removed at the end, unless scores are kept. Reads of the
    checkpoint: one for each pass, those of ``files.pruning.prune``, and one for the masks of the
    update.
    """
    require_extra()
    communicator, say = world(), tell or (lambda text: None)
    where = torch.device(device or "cpu")
    kept, files = None if keep_scores is None else Path(keep_scores).absolute(), dict[str, bytes]()
    if windows is None and own_text is None:
        raise SelectionError("there is no text; expected windows, or own_text.")
    to_run = windows or any_text(1, own_text.length if own_text else 0)
    settings = Settings(
        to_run, evaluation, update, damping, batch_size, dtype, where, progress,
        recipe=recipe, polish=polish,
    )  # fmt: skip

    def check(target: Path, checkpoint: Checkpoint) -> None:
        """Before what takes long."""
        _check_request(settings, kept, rounds)
        check_destination(target, [file.path for file in checkpoint.all_files], replaces=replace)
        _open(source, settings)

    if own_text is not None:
        own, files[OWN_TEXT_FILE] = own_text_of(source, destination, own_text, settings, check)
        both = own if windows is None else windows + own
        settings = dataclasses.replace(settings, windows=both)

    def begin() -> tuple[Path, dict[str, Any], str]:
        checkpoint = open_checkpoint(source)
        target = resolve_destination(destination, checkpoint.root)
        facts = settings.facts(checkpoint) | {"rounds": list(rounds)}
        text = digest_of(facts)
        if _finished(target, text) is None:
            check(target, checkpoint)
        return target, facts, text

    target, facts, text = communicator.run(
        begin, lambda found: [("text, recipe and model", found[2])]
    )
    told, last = {"text": text, "rounds": list(rounds), "files": list(files)}, len(rounds)
    places = [target.with_name(f"{target.name}.partial-text-{n}") for n in range(last)] + [target]
    done = communicator.run(lambda: [_finished(place, text) for place in places])
    made = done[last]
    if made is not None:
        say(f"{target} is finished: this command made it before. Nothing was changed.")
        return made
    works = [
        Work(place, {**facts, "round": n}, communicator, kept if n == last else None)
        for n, place in enumerate(places)
    ]
    communicator.run(partial(list, map(Work.check, works)))
    first = max((number + 1 for number, found in enumerate(done) if found), default=0)
    made = done[first - 1] if first else None
    for number in range(first, last + 1):
        place, work = places[number], works[number]
        begun_from, changes = places[number - 1] if number else source, dict[str, Any]()
        if number < last:
            changes = {"sparsity": rounds[number], "masks": False, "card": False}
        if number and settings.collects == "gradients":
            changes["statistics"] = str(places[number - 1] / STATISTICS_FILE)
        now = dataclasses.replace(settings, recipe=recipe.model_copy(update=changes))
        if number < last:
            now = dataclasses.replace(now, polish=0, evaluation=None if number else evaluation)
        if rounds:
            say(f"Round {number + 1} of {last + 1}: {now.recipe.sparsity:.0%}.")
        streamed, stored, cost = communicator.run(partial(_open, begun_from, now))
        dense = None
        if now.polish and number:
            dense = communicator.run(partial(StreamedModel, source, dtype, where))
        with work.begun(cost.disk + streamed.checkpoint.num_bytes, say):
            before = None if made is None else made.before
            passes = Passes(streamed, now, work, stored, before, dense)
            chosen, values, ranked = passes.run(told)
            values = dataclasses.replace(values, files=files if number == last else {})
        planned = communicator.run(partial(plan, begun_from, chosen, values=values))
        for warning in planned.warnings:
            say(f"Warning: {warning}")
        run: Any = {"progress": progress, "tell": say, "ranked": ranked}
        report = prune_files(planned, place, replace=replace and number == last, **run)
        work.remove()
        made = _result_of(report)
        if communicator.index == 0 and number < last:
            # The digest of the next round has the times of its source: those of any run are equal.
            for file in place.glob("*"):
                os.utime(file, ns=(0, 0))
        if communicator.index == 0 and number:
            shutil.rmtree(places[number - 1], ignore_errors=True)
        communicator.agree()
    assert made is not None
    return made


def _open(
    source: str | Path, settings: Settings, own_text: bool = False
) -> tuple[StreamedModel, StoredLayers, StreamCost]:
    """The model of a round, its stored layers, and what it needs. Local; changes nothing.

    Raises: what the layers, the windows, or what the recipe selects cannot do.
    """
    streamed = StreamedModel(source, settings.dtype, settings.device)
    for windows in (settings.windows, settings.evaluation):
        if windows is not None:
            check_run(streamed.model, windows.tokens, settings.batch_size)
    stored = StoredLayers(streamed, settings.recipe)
    if settings.collects is not None:
        stored.statistics_names()
    for module, name in itertools.chain(*stored.parameters):
        reads_inputs = settings.moves or settings.collects == "activations"
        shape = module.get_parameter(name).shape
        if reads_inputs and layout_of(module, name, shape) is None:
            raise NotImplementedError(
                f"{type(streamed.model).__name__}: what is multiplied with {name} of "
                f"{type(module).__name__} is not known, by which weights are ranked or moved; "
                "expected score fisher and update none, or exclude it."
            )
    return streamed, stored, cost_of(streamed, stored, settings, own_text)


def _check_request(settings: Settings, kept: Path | None, rounds: Sequence[float]) -> None:
    """Check what would be found out after hours else."""
    recipe = settings.recipe
    check_scores(recipe, made=settings.elementwise)
    if kept is not None and not settings.elementwise:
        raise SelectionError(
            f"scores are to be kept in {kept}, and single weights get none; expected score "
            f"{' or '.join(ELEMENTWISE)}, without a folder of scores."
        )
    steps = [0.0, *rounds, recipe.sparsity or 0.0]
    if rounds and (recipe.groups or steps != sorted(set(steps))):
        raise SelectionError(
            f"rounds {list(rounds)} before a sparsity of {recipe.sparsity}; expected rising ones "
            "below the sparsity of a recipe without groups, such as 0.35 and 0.5 before 0.6."
        )


def estimate(
    source: str | Path,
    recipe: Recipe,
    num_windows: int,
    length: int,
    *,
    update: Update = "least_squares",
    own_text: bool = False,
    polish: int = 0,
    num_evaluated: int = 0,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
) -> StreamCost:
    """What :func:`prune_folder` would need of each process, and of the disk. Local.

    Args:
        source, recipe, update, polish, batch_size, dtype: as for :func:`prune_folder`.
        num_windows, length: of the text.
        own_text: whether the model writes some of it.
        num_evaluated: windows of held-out text.

    Raises: as :func:`prune_folder`, for what the headers show.

    Cost: builds the model without weights; some seconds.
    """
    require_extra()

    text, device = any_text(num_windows, length), torch.device("cpu")
    held_out = any_text(num_evaluated, length) if num_evaluated else None
    how: Any = {"recipe": recipe, "polish": polish}
    settings = Settings(text, held_out, update, DAMPING, batch_size, dtype, device, **how)
    return _open(source, settings, own_text)[2]


def any_text(num_windows: int, length: int) -> TokenWindows:
    """Windows for what depends on their sizes alone."""
    nothing = torch.zeros(num_windows, length, dtype=torch.int64)
    return TokenWindows((), nothing, nothing[:, 0], has_bos=False)


def room_of(device: str) -> int:
    """Bytes of memory that each process of this machine can use of a kind of device.

    Nine tenths of what the machine or its container has, or the accelerator.
    """
    if device != "cpu":
        return int(0.9 * torch.accelerator.get_memory_info()[1])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(limit.read_text()))
    return int(0.9 * total) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def own_text_of(
    source: str | Path,
    destination: str | Path,
    asked: OwnText,
    settings: TextSettings,
    check: Callable[[Path, Checkpoint], object],
) -> tuple[TokenWindows, bytes]:
    """The text that the model has written, or writes now, and its file. Collective."""
    communicator = world()

    def find() -> tuple[Path, str, Path | None]:
        checkpoint = open_checkpoint(source)
        target = resolve_destination(destination, checkpoint.root)
        made_by = digest_of([source_facts(checkpoint), asked.windows, asked.length, asked.seed])
        work = target.with_name(f"{target.name}.partial-text") / Path(OWN_TEXT_FILE).name
        places = (target / OWN_TEXT_FILE, work)
        found = [place for place in places if place.exists() and origin_of(place) == made_by]
        if not found:
            check(target, checkpoint)
        return work, made_by, found[0] if found else None

    work, made_by, found = communicator.run(find, lambda found: [("own text", str(found))])
    if found is None:
        model = load_sharded(source, wrap="none", dtype=settings.dtype, device=settings.device)
        windows = write_text(
            model,
            asked.tokenizer,
            windows=asked.windows,
            length=asked.length,
            seed=asked.seed,
            progress=settings.progress,
        )

        def save() -> None:
            if communicator.index == 0:
                with writing(work):
                    work.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                windows.save(work, made_by)

        communicator.run(save)
        found = work
    read = partial(read_windows, asked.tokenizer, found, asked.length)
    return dataclasses.replace(read(), texts=(OWN_TEXT,)), found.read_bytes()


def _finished(target: Path, text: str) -> PrunedFolder | None:
    """The destination, if this command has made it."""
    with contextlib.suppress(CheckpointError):
        report = read_report(target)
        if report.inputs.get("update", {}).get("text") == text:
            return _result_of(report)
    return None


def _result_of(report: Report) -> PrunedFolder:
    facts = report.inputs["update"]
    measured = facts.get("perplexity", {})
    errors = {name: (before, after) for name, before, after in facts["errors"]}
    return PrunedFolder(report, measured.get("before"), measured.get("after"), errors)
