"""Shrink: take neurons and experts out of a language model, so that it is smaller.

[Note: what to cut] Which tensors have a row or a column for each neuron, or for each expert, is not
written down for each family. A model of the smaller configuration is built without weights, and
compared with the one that is there: tensors whose shapes differ are cut along the dimension that
differs. So the result is a model that transformers builds from its configuration, and where the
configuration cannot say what is left, this shows before any text is read.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distprune._transformers import decoder_layers, empty_model, pretrained_model
from distprune.base.amount import table
from distprune.base.naming import NamedParameter, named_modules
from distprune.base.pruned_form import is_dtensor
from distprune.language_models import running
from distprune.language_models.calibrating import calibrate, prune_block_by_block
from distprune.language_models.folders import require_extra
from distprune.language_models.text import TokenWindows
from distprune.ranks.collectives import world
from distprune.reconstruction import DAMPING, solve_columns
from distprune.statistics.gradients import GradientStatistics
from distprune.statistics.gram import GramMatrices
from distprune.statistics.parameters import layout_of
from distprune.wrappers.wrapper import managed_parameters

# What configurations call the size of an MLP, and the number of experts, and of those for a token.
_KEYS = {
    "neurons": (
        "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "dim_ff",
    ),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}  # fmt: skip
_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k")
# A linear layer that has all gates, then all other inner outputs.
_FUSED = "gate_up_proj"


@dataclass(frozen=True)
class ShrunkLayer:
    """What one decoder layer lost.

    Attributes:
        name: of the layer.
        kind: "neurons" or "experts".
        total: how many there were.
        removed: the numbers of those that were taken out.
        error_before: |(w0 - w) X|^2 / |w0 X|^2 of the matrix after the neurons, without them ...
        error_after: ... and with the update of what is left. None: there was no update.
        unseen: numbers of experts to which no token came.
    """

    name: str
    kind: str
    total: int
    removed: tuple[int, ...]
    error_before: float | None = None
    error_after: float | None = None
    unseen: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShrinkReport:
    """What ``shrink`` did; the same on every rank.

    Attributes:
        layers: an entry for each layer and kind.
        parameters_before, parameters_after: elements of all parameters.
    """

    layers: tuple[ShrunkLayer, ...]
    parameters_before: int
    parameters_after: int

    def __str__(self) -> str:
        rows = []
        for layer in self.layers:
            errors = (layer.error_before, layer.error_after)
            texts = ["" if error is None else f"{error:.4g}" for error in errors]
            removed = f"{len(layer.removed):,} of {layer.total:,} {layer.kind}"
            rows.append([layer.name, removed, *texts, ", ".join(map(str, layer.unseen))])
        gone = self.parameters_before - self.parameters_after
        total = ["all", f"{gone:,} of {self.parameters_before:,} parameters", "", "", ""]
        heading = ["layer", "removed", "error before", "error after", "experts without a token"]
        return "\n".join(table(heading, rows, total))


def shrink(
    model: nn.Module,
    windows: TokenWindows | None = None,
    *,
    neurons: float = 0.0,
    experts: float = 0.0,
    round_to: int = 128,
    update: bool = True,
    damping: float = DAMPING,
    unseen_first: bool = False,
    batch_size: int = 1,
    progress: running.Report | None = None,
) -> tuple[Any, ShrinkReport]:
    """Take neurons out of all MLPs, and experts out of all mixtures. Collective over all ranks.

    small, report = language_models.shrink(model, windows, neurons=0.2)
    small.save_pretrained("smaller")

    Each layer loses the same number, and decides which. The result is an ordinary model of the same
    class with fewer parameters, which transformers loads: no runtime has to know of zeros.

    - A neuron is worth the sum of the squares of the Fisher scores by factors of its row of the
      first matrices of the MLP and of its column of the last one; without text, of the magnitudes.
      Then the kept columns of the last matrix change by least squares, layer by layer, for the
      inputs that the layers before, without their neurons, give.
    - An expert is worth the mean, over the tokens that come to it, of its gate weight times the
      norm of its output (REAP). Its row of the router goes with it, and of the router's bias.
      Shared experts stay. Where the router chooses among groups, each group loses the same number.

    On several ranks, each has the whole model, and they share the windows, in any number.

    Args:
        model: of transformers, plain, on every rank; not changed.
        windows: of text, the same on every rank; None: neurons go by their magnitudes, and nothing
            is updated.
        neurons: the share of each MLP that goes, below 1. Layers with experts keep theirs.
        experts: the share of each mixture that goes, below 1; needs windows.
        round_to: how many neurons are left is a multiple of it, the nearest one.
        update: whether kept columns change.
        damping: as for ``reconstruct``.
        unseen_first: whether experts to which no token came go first; else they go last.
        batch_size, progress: as for ``calibrate``.

    Returns:
        The smaller model, which shares tensors that were not cut with ``model``; and a report.

    Raises:
        NotImplementedError: a sharded or wrapped model, or none of transformers; one whose
            configuration has no number for what would be left, or whose parameters have masks or
            adapters; layers that cannot run one by one (``update=False`` shrinks them).
        ValueError: shares out of range, or of which nothing would go or be left; fewer experts than
            a token needs; weights that are not finite; and as ``calibrate``. On every rank.

    Cost: memory for what is cut, and for a copy of the last matrix of each MLP. For neurons a
    forward and a backward of each window; for the update two forwards more, and that of
    ``GramMatrices`` of a layer; for experts a forward, in which mixtures run twice.

    Source: LeCun et al., Optimal Brain Damage, for the worth of neurons; Lasby et al., REAP, arXiv
    2510.13999, for that of experts.
    """
    require_extra()
    options = f"{neurons}, {experts}, {round_to}, {update}, {damping}, {unseen_first}"
    facts = [("shares and options", options), ("has windows", str(windows is not None))]
    plans = world().run(
        lambda: plans_of(model, windows is not None, neurons, experts, round_to), lambda _: facts
    )
    pretrained: Any = model
    small, rows = pretrained, list[ShrunkLayer]()
    run: Any = {"batch_size": batch_size, "progress": progress}
    for plan in plans:
        if plan.kind == "experts":
            assert windows is not None
            small, found = _without_experts(small, plan, windows, unseen_first, run)
        else:
            used = damping if update else None
            small, found = _without_neurons(small, plan, windows, used, run)
        rows += found
    return small, ShrinkReport(tuple(rows), pretrained.num_parameters(), small.num_parameters())


Shapes = dict[str, tuple[int, ...]]


class Layer(NamedTuple):
    """What a decoder layer loses some of.

    Attributes:
        name: of the layer.
        total, kept: how many neurons or experts it has, and is to have.
        dims: the dimension along which each tensor is cut; where it is twice as large as ``total``,
            all gates come first.
        inner: the name of the weight whose inputs are the neurons, or of the module of the experts.
    """

    name: str
    total: int
    kept: int
    dims: dict[str, int]
    inner: str


class Plan(NamedTuple):
    """What is cut.

    Attributes:
        kind: "neurons" or "experts".
        config: of the result.
        shapes: of the tensors of the result.
        layers: those that lose some.
        groups: among which a router chooses; 1 for neurons.
    """

    kind: str
    config: Any
    shapes: Shapes
    layers: list[Layer]
    groups: int


def plans_of(
    model: nn.Module, has_text: bool, neurons: float, experts: float, round_to: int
) -> list[Plan]:
    """What ``shrink`` would cut: experts, then neurons. Local; no weight is read.

    Args:
        model: may be without weights.
        has_text: whether there are windows.
        neurons, experts, round_to: as for :func:`shrink`.

    Raises: as :func:`shrink`, where it does not depend on weights or text.
    """
    pretrained = pretrained_model(model)
    owned = {*map(id, model.modules())}  # others of this process may be sharded
    is_sharded = any(owner in owned for owner, _ in managed_parameters(model))
    if pretrained is not model or is_sharded or any(map(is_dtensor, model.parameters())):
        raise NotImplementedError(
            f"{type(model).__name__} is wrapped, sharded, or no model of transformers; expected a "
            'plain one on every rank: load_sharded(folder, wrap="none"), adapters merged into it.'
        )
    if not (0 <= neurons < 1 and 0 <= experts < 1 and neurons + experts > 0 and round_to >= 1):
        raise ValueError(
            f"{neurons=}, {experts=}, {round_to=}; expected shares below 1, one of them above 0, "
            "and a multiple of 1 or more."
        )
    if experts and not has_text:
        raise ValueError(f"{experts=} without windows; expected text, by which experts are chosen.")
    config, shapes, plans = pretrained.config, _shapes(model), list[Plan]()
    for kind, share in (("experts", experts), ("neurons", neurons)):
        if share:
            plans.append(_plan(pretrained, config, shapes, kind, share, round_to))
            config, shapes = plans[-1].config, plans[-1].shapes
    return plans


def _shapes(model: nn.Module) -> Shapes:
    return {name: tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items()}


def _plan(model: Any, config: Any, shapes: Shapes, kind: str, share: float, multiple: int) -> Plan:
    """The plan of one kind; see [Note: what to cut]."""
    config = copy.deepcopy(config)
    text, groups = config.get_text_config(), 1
    if kind == "experts":
        groups = multiple = getattr(text, "n_group", None) or 1
    for key in filter(partial(hasattr, text), _KEYS[kind]):
        total = before = getattr(text, key)
        if before is None and kind == "neurons":  # then families have four times the features
            total = 4 * text.hidden_size
        if not isinstance(total, int) or not total:
            continue
        kept = round((1 - share) * total / multiple) * multiple
        if not 0 < kept < total:
            raise ValueError(
                f"{kind}={share}: {kept} of {key}={total} would be left, in multiples of "
                f"{multiple}; expected some and not all: another share, or another multiple."
            )
        setattr(text, key, kept)
        smaller = _shapes(empty_model(type(model), config))
        if smaller != shapes:
            break
        setattr(text, key, before)
    else:
        raise NotImplementedError(
            f"no number of the configuration of {type(model).__name__} changes its {kind}; "
            f"expected one of {', '.join(_KEYS[kind])}, and a model that has {kind}."
        )
    if kind == "experts":
        _check_router(text, kept, groups)
    return Plan(kind, config, smaller, _layers(model, kind, key, shapes, smaller), groups)


def _check_router(config: Any, kept: int, groups: int) -> None:
    """Raise ValueError if a router could not choose as many experts for a token as before."""
    per_token = max(getattr(config, key, None) or 1 for key in _PER_TOKEN)
    chosen = getattr(config, "topk_group", None) or groups
    # A group is judged by the best two of its experts.
    if kept // groups * chosen < per_token or (groups > 1 and kept // groups < 2):
        raise ValueError(
            f"{kept} experts in {groups} groups would be left, and a token goes to {per_token} in "
            f"{chosen} groups; expected a smaller share of experts."
        )


def _layers(model: nn.Module, kind: str, key: str, shapes: Shapes, smaller: Shapes) -> list[Layer]:
    """What each decoder layer loses.

    Raises:
        NotImplementedError: a tensor changes that is none of those expected.
    """
    names = {id(module): name for name, module in named_modules(model)}
    blocks = [names[id(module)] for module in decoder_layers(model)]
    cut: dict[str, dict[str, int]] = {}
    for name in sorted(shapes.keys() | smaller.keys()):
        before, after = shapes.get(name, ()), smaller.get(name, ())
        if before == after:
            continue
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        pairs = enumerate(zip(before, after, strict=False))
        changed = [dim for dim, (one, other) in pairs if one != other]
        if not block or len(before) != len(after) or len(changed) != 1:
            raise _unknown(name, key)
        cut.setdefault(block, {})[name] = changed[0]
    find = _mixtures if kind == "experts" else _last_matrices
    layers = []
    for block in filter(cut.__contains__, blocks):
        dims = cut[block]
        inner = find(model, block, dims, shapes)
        if len(inner) != 1:
            raise _unknown(next(iter(dims)), key)
        ((found, weight),) = inner.items()
        total, kept = (sizes[weight][dims[weight]] for sizes in (shapes, smaller))
        for name, dim in dims.items():
            size = 2 * total if _FUSED in name and kind == "neurons" else total
            if shapes[name][dim] != size or smaller[name][dim] * total != size * kept:
                raise _unknown(name, key)
        layers.append(Layer(block, total, kept, dims, found))
    return layers


def _unknown(name: str, key: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} is not what a smaller {key} may change: expected linear layers of one MLP in each "
        "decoder layer; or a router, and experts that are called with tokens, numbers of experts, "
        "and gates. Prune the weights of this model instead."
    )


def _last_matrices(
    model: nn.Module, block: str, dims: dict[str, int], shapes: Shapes
) -> dict[str, str]:
    """The weights whose inputs are neurons; none if what is cut is not of linear layers alone."""
    found = {}
    for name, dim in dims.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "bias" and f"{path}.weight" in dims:
            continue
        layout = layout_of(model.get_submodule(path), leaf, torch.Size(shapes[name]))
        if layout is None or layout.kind not in ("linear", "conv1d_of_transformers"):
            return {}
        if dim == layout.input_dim:
            found[name] = name
    return found


def _mixtures(model: nn.Module, block: str, dims: dict[str, int], shapes: Shapes) -> dict[str, str]:
    """The modules of fused experts, and a weight of each; none if their numbers are stored."""
    found = {name.rpartition(".")[0]: name for name in dims if len(shapes[name]) == 3}
    layer = model.get_submodule(block)
    stores_numbers = not all(tensor.is_floating_point() for tensor in layer.state_dict().values())
    calls = [inspect.signature(model.get_submodule(path).forward).parameters for path in found]
    return {} if stores_numbers or any(len(call) != 3 for call in calls) else found


def _without_neurons(
    model: Any, plan: Plan, windows: TokenWindows | None, damping: float | None, run: dict[str, Any]
) -> tuple[Any, list[ShrunkLayer]]:
    """The model without its least neurons.

    Args:
        damping: of the update; None: there is none.
        run: batch_size and progress.
    """
    pairs = [pair for layer in plan.layers for pair in weights_of_neurons(model, layer)]
    factors: Factors = {}
    if windows is not None:
        statistics = GradientStatistics(pairs)
        calibrate(model, windows, statistics, **run)
        factors = {p.fqn: scores.terms[0] for p, scores in statistics.fisher().items()}
    kept = best(plan, [worth_of_neurons(model, layer, factors) for layer in plan.layers])
    if windows is None or damping is None:
        return cut(model, plan, kept), rows_of(plan, kept)
    last = [pair_of(model, layer.inner) for layer in plan.layers]
    chosen = {layer.inner: (layer, stay) for layer, stay in zip(plan.layers, kept, strict=True)}
    before, grams = [getattr(*pair).data.clone() for pair in last], GramMatrices(last)

    def take_over(found: Sequence[NamedParameter]) -> list[float]:
        (pair,) = found
        (layer, stay), gram = chosen[pair.fqn], grams.matrix(*pair)
        return move_columns(model, layer, stay, gram, damping, getattr(*pair).dtype)

    try:
        errors = prune_block_by_block(model, windows, grams, take_over, **run)
        return cut(model, plan, kept), rows_of(plan, kept, errors)
    finally:
        for pair, values in zip(last, before, strict=True):
            getattr(*pair).data.copy_(values)


def pair_of(model: nn.Module, name: str) -> NamedParameter:
    """A parameter by its full name."""
    path, _, leaf = name.rpartition(".")
    return NamedParameter(model.get_submodule(path), leaf, name)


def weights_of_neurons(model: nn.Module, layer: Layer) -> list[NamedParameter]:
    """The matrices of a layer that have a row or a column for each neuron."""
    pairs = [pair_of(model, name) for name in layer.dims]
    return [pair for pair in pairs if getattr(*pair).ndim == 2]


# What Fisher by factors multiplies magnitudes by, by name of the weight.
Factors = Mapping[str, Sequence[Tensor]]


def worth_of_neurons(model: nn.Module, layer: Layer, factors: Factors) -> Tensor:
    """What each neuron of a layer is worth, fp64 [neurons]; without factors by magnitude."""
    worth = torch.zeros(layer.total, dtype=torch.float64)
    for pair in weights_of_neurons(model, layer):
        score = getattr(*pair).detach().double()
        for factor in factors.get(pair.fqn, ()):
            score = score * factor.to(score.device)
        by_neuron = score.square().sum(1 - layer.dims[pair.fqn])
        worth += by_neuron.view(-1, layer.total).sum(0).cpu()
    return worth


def move_columns(
    model: nn.Module, layer: Layer, stay: Tensor, gram: Tensor, damping: float, dtype: torch.dtype
) -> list[float]:
    """Let the neurons of a layer that stay take over, the others become 0.

    Args:
        gram: the Gram matrix of the neurons.
        dtype: in which the result is kept.

    Returns:
        The relative errors of ``ShrunkLayer``.

    Raises:
        ValueError: new weights are not finite in their dtype.
    """
    weight = getattr(*pair_of(model, layer.inner)).data
    view = weight if layer.dims[layer.inner] == 1 else weight.T
    stay, gram = stay.to(view.device), gram.to(view.device)
    new, *errors = solve_columns(view, stay, gram, damping, layer.inner)
    view.copy_(new)
    running.check_finite({layer.inner: weight.to(dtype)})
    return errors


def best(plan: Plan, worths: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of what stays in layers, rising; of what is worth as much, the last ones.

    Collective.

    Args:
        worths: fp64 [neurons or experts], of each of the plan's layers.

    Raises:
        ValueError: a worth is not a number.
    """

    def choose() -> list[Tensor]:
        kept = []
        for layer, worth in zip(plan.layers, worths, strict=True):
            if bool(worth.isnan().any()):
                raise ValueError(
                    f"{layer.name}: what some of its {plan.kind} are worth is not a number; "
                    "expected finite weights and outputs."
                )
            of_groups = worth.view(plan.groups, -1)
            order = of_groups.argsort(dim=1, stable=True)[:, -(layer.kept // plan.groups) :]
            first = torch.arange(plan.groups)[:, None] * of_groups.shape[1]
            kept.append((first + order).flatten().sort().values)
        return kept

    label = f"sums of the numbers of {plan.kind} that stay"
    return world().run(choose, lambda kept: [(label, str([int(n.sum()) for n in kept]))])


def rows_of(
    plan: Plan,
    kept: Sequence[Tensor],
    errors: Sequence[Sequence[float]] = (),
    sums: Sequence[Tensor] = (),
) -> list[ShrunkLayer]:
    """What the report says of layers.

    Args:
        kept: of each layer, the numbers of what stays.
        errors: of each layer, those of :func:`move_columns`; none if nothing has moved.
        sums: of each layer, those of :func:`counting_tokens`; none if it loses neurons.
    """
    rows, none = [], [None] * len(kept)
    facts_of = zip(plan.layers, kept, errors or none, sums or none, strict=True)
    for layer, stay, moved, counted in facts_of:
        removed = tuple(sorted({*range(layer.total)} - {*stay.tolist()}))
        unseen = () if counted is None else tuple((counted[0] == 0).nonzero().view(-1).tolist())
        before, after = moved or (None, None)
        facts = layer.name, plan.kind, layer.total, removed, before, after, unseen
        rows.append(ShrunkLayer(*facts))
    return rows


def cut(model: Any, plan: Plan, kept: Sequence[Tensor]) -> Any:
    """A model of the plan's configuration with what stays; it shares what is not cut.

    Args:
        model: may be without weights: so is the result.
    """
    small, state = empty_model(type(model), plan.config), model.state_dict()
    for layer, stay in zip(plan.layers, kept, strict=True):
        for name in layer.dims:
            state[name] = cut_tensor(layer, stay, name, state[name])
    small.load_state_dict(state, assign=True)
    small.tie_weights()
    small.generation_config = model.generation_config
    return small.to(model.device).train(model.training)


def cut_tensor(layer: Layer, stay: Tensor, name: str, whole: Tensor) -> Tensor:
    """What stays of a tensor that a layer cuts."""
    dim = layer.dims[name]
    starts = range(0, whole.shape[dim], layer.total)
    index = torch.cat([start + stay for start in starts]).to(whole.device)
    return whole.index_select(dim, index)


def _without_experts(
    model: Any, plan: Plan, windows: TokenWindows, unseen_first: bool, run: dict[str, Any]
) -> tuple[Any, list[ShrunkLayer]]:
    """The model without its least experts."""
    ranks, communicator = running.check_same(model, windows, run["batch_size"]), world()
    finished = running.reporter("calibrate", len(windows), run["progress"])
    sums = torch.zeros(len(plan.layers), 2, plan.layers[0].total, dtype=torch.float64)
    with (
        communicator.raising_everywhere(),
        contextlib.ExitStack() as hooks,
        running.in_eval_mode(model),
        torch.no_grad(),
    ):
        for layer, of_layer in zip(plan.layers, sums, strict=True):
            hooks.enter_context(counting_tokens(model, layer, of_layer))
        for step in running.steps_of(len(windows), run["batch_size"], ranks):
            if step.num_windows:
                running.output_of(model, windows.tokens[step.rows], needs_logits=False)
            finished(step.num_in_step)
    sums = communicator.reduce_floats(sums.numel(), sums.flatten).view_as(sums)
    kept = best(plan, worths_of_experts(sums, unseen_first))
    return cut(model, plan, kept), rows_of(plan, kept, sums=list(sums))


def worths_of_experts(sums: Tensor, unseen_first: bool) -> list[Tensor]:
    """What each expert is worth, fp64 [experts], of each layer.

    Args:
        sums: [layers, 2, experts], those of :func:`counting_tokens`.
        unseen_first: as for :func:`shrink`.
    """
    unseen = -1.0 if unseen_first else torch.inf
    return list(torch.where(sums[:, 0] == 0, unseen, sums[:, 1] / sums[:, 0]))


def counting_tokens(model: nn.Module, layer: Layer, sums: Tensor) -> RemovableHandle:
    """A context: adds the tokens that come to the experts of a layer, and what they say of each.

    Args:
        sums: fp64 [2, experts]: of each, the number of tokens, and the sum of gate weight times
            norm of its output.
    """
    experts = model.get_submodule(layer.inner)
    return experts.register_forward_pre_hook(partial(_add_tokens, sums))


def _add_tokens(sums: Tensor, experts: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
    """Add the tokens of a call to what is known of each expert, by running each of them alone."""
    states, chosen, weights = args
    rows = states.reshape(-1, states.shape[-1]).repeat_interleave(chosen.shape[-1], 0)
    of_rows = chosen.reshape(-1, 1)
    outputs = experts.forward(rows, of_rows, torch.ones_like(of_rows, dtype=weights.dtype))
    worth = outputs.double().norm(dim=-1) * weights.reshape(-1).double()
    numbers = of_rows.view(-1).cpu()
    sums[0].index_add_(0, numbers, torch.ones(len(numbers), dtype=sums.dtype))
    sums[1].index_add_(0, numbers, worth.cpu())
