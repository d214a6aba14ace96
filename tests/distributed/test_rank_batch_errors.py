"""Mistakes around rank batches: every rank raises the same, no hook is left, nothing hangs."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distprune.criteria import Fisher, Taylor
from distprune.testing import run_ranks
from distprune.wrappers import fsdp2
from helpers import wrappings
from helpers.micro_batches import Wrapped, loss_of, micro_batch
from helpers.models import Net, fill

SOME = ["plain-2", "ddp-2", "fsdp1-2", "fsdp2-2", "tp-2"]


def hooks_left(model: nn.Module) -> list[str]:
    """Whatever a criterion could have left on the leaves of a model."""
    leaves = dict(wrappings.unwrapped(model).named_parameters())
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if module._handle is not None:
            leaves[f"flat {len(leaves)}"] = module._handle.flat_param
    for group in fsdp2._groups():
        for fsdp_param in group.fsdp_params:
            leaves[f"gathered {len(leaves)}"] = getattr(fsdp_param, "_unsharded_param", None)
            if "init_unsharded_param" in fsdp_param.__dict__:
                leaves["replaced method"] = None
    left = [name for name, leaf in leaves.items() if leaf is not None and leaf._backward_hooks]
    return left + ["a method"] * ("replaced method" in leaves)


def no_backward(criterion, model, backward) -> None:
    with criterion.batch():
        pass


def two_backward_passes(criterion, model, backward) -> None:
    with criterion.batch():
        backward()
        backward()


def backward_outside(criterion, model, backward) -> None:
    with criterion.batch():
        backward()
    backward()


def caught_error(criterion, model, backward) -> None:
    try:
        with criterion.batch():
            backward()
            raise KeyError("of the user's")
    except KeyError:
        pass


def batch_inside_of_batch(criterion, model, backward) -> None:
    with criterion.batch():
        backward()
        with criterion.batch():
            pass


def calibrating_inside(criterion, model, backward) -> None:
    with criterion.calibrating():
        pass


def scores_inside(criterion, model, backward) -> None:
    with criterion.batch():
        backward()
    criterion.scores()


def state_inside(criterion, model, backward) -> None:
    criterion.state_dict()


def reset_inside(criterion, model, backward) -> None:
    criterion.reset()


def negative_weight(criterion, model, backward) -> None:
    with criterion.batch(weight=-1):
        backward()


def loss_scale_of_zero(criterion, model, backward) -> None:
    with criterion.batch(loss_scale=0):
        backward()


def update(criterion, model, backward) -> None:
    criterion.update()


MISTAKES = {
    no_backward: "no gradient of any parameter",
    two_backward_passes: "2 gradients in one batch",
    backward_outside: r"outside of batch\(\)",
    caught_error: "ended with an error",
    batch_inside_of_batch: r"batch\(\) inside of batch\(\)",
    calibrating_inside: r"calibrating\(\) inside of calibrating\(\)",
    scores_inside: r"after calibrating\(\)",
    state_inside: r"after calibrating\(\)",
    reset_inside: r"after calibrating\(\)",
    negative_weight: "weight=-1",
    loss_scale_of_zero: "loss_scale=0",
    update: "unit='rank_batch'",
}


def errors(wrapping: str, mistake) -> tuple[str, str, list[str], bool]:
    """The error of a calibration, that of scores() afterwards, hooks left, and a second try."""
    wrapped = Wrapped(wrapping, "float32")
    model, criterion = wrapped.model, Fisher(wrapped.pairs, unit="rank_batch")

    def backward() -> None:
        wrapped.loss(0).backward()

    texts = []
    for call in (lambda: calibrate(mistake), criterion.scores):

        def calibrate(mistake):
            with criterion.calibrating():
                mistake(criterion, model, backward)

        try:
            call()
            texts.append("nothing")
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    left = hooks_left(model)
    criterion.reset()
    with criterion.calibrating(), criterion.batch():
        backward()
    return texts[0], texts[1], left, len(criterion.scores()) == len(wrapped.pairs)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("wrapping", SOME)
def test_mistakes(wrapping, mistake):
    for first, second, left, works_after_reset in run_ranks(errors, 2, wrapping, mistake):
        assert re.search(MISTAKES[mistake], first), first
        assert "reset()" in second
        assert left == [] and works_after_reset


def mistake_of_one_rank(wrapping: str, kind: str) -> tuple[str, list[str]]:
    """Rank 1 alone does something wrong; every rank goes on to the end of the calibration."""
    wrapped = Wrapped(wrapping, "float32")
    model, criterion = wrapped.model, Fisher(wrapped.pairs, unit="rank_batch")
    x, y = micro_batch(wrapped.dense, "float32", dist.get_rank(), 0)
    is_wrong = dist.get_rank() == 1
    try:
        with criterion.calibrating():
            if kind == "infinite gradient":
                y = y * torch.inf if is_wrong else y
            if kind == "no backward" and is_wrong:
                with criterion.batch():
                    pass
            elif kind == "backward outside" and is_wrong:
                loss_of(model, (x, y)).backward()
            else:
                with criterion.batch():
                    loss_of(model, (x, y)).backward()
        return "nothing", hooks_left(model)
    except (RuntimeError, ValueError) as error:
        return str(error), hooks_left(model)


@pytest.mark.parametrize(
    ("wrapping", "kind"),
    [
        ("plain-3", "no backward"),
        ("plain-3", "backward outside"),
        ("fsdp1-3", "backward outside"),
        ("fsdp2-3", "backward outside"),
        ("plain-3", "infinite gradient"),
        ("ddp-3", "infinite gradient"),
        ("fsdp1-3", "infinite gradient"),
        ("fsdp2-3", "infinite gradient"),
        ("hsdp-2x2", "infinite gradient"),
    ],
)
def test_a_mistake_of_one_rank_is_raised_on_all(wrapping, kind):
    words = {
        "no backward": "no gradient of any parameter",
        "backward outside": "outside of batch()",
        "infinite gradient": "not finite",
    }
    size = wrappings.world_size(wrapping)
    for text, left in run_ranks(mistake_of_one_rank, size, wrapping, kind):
        assert words[kind] in text, text
        assert "Linear." in text or kind == "no backward"
        assert left == []


def error_inside(wrapping: str) -> list[str]:
    """An error of the user's own, on every rank."""
    wrapped = Wrapped(wrapping, "float32")
    model, criterion = wrapped.model, Fisher(wrapped.pairs, unit="rank_batch")
    with pytest.raises(KeyError), criterion.calibrating():
        raise KeyError("of the user's")
    return hooks_left(model)


@pytest.mark.parametrize("wrapping", SOME)
def test_an_error_inside_takes_the_hooks_off(wrapping):
    assert run_ranks(error_inside, 2, wrapping) == [[], []]


def error_of_group(kind: str) -> str:
    """A model under TP, in pairs of four ranks that are replicas of each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"l1": ColwiseParallel(), "l2": RowwiseParallel()}
    dense = fill(Net((6, 12, 5, 3)), "normal", "float32")
    model = parallelize_module(copy.deepcopy(dense), mesh["tp"], plan)
    group = {"none": None, "tp": mesh["tp"].get_group(), "world": dist.group.WORLD}[kind]
    try:
        criterion = Fisher([(model.l1, "weight")], unit="rank_batch", group=group)
        with criterion.calibrating(), criterion.batch():
            model(torch.ones(2, 6)).sum().backward()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_tensor_parallel_replicas_need_their_data_parallel_group():
    for text in run_ranks(error_of_group, 4, "none"):
        assert "Linear.weight" in text and "2 of 4 ranks" in text and "group=" in text
    for text in run_ranks(error_of_group, 4, "world"):
        assert "Linear.weight" in text and "data-parallel ranks" in text
    assert run_ranks(error_of_group, 4, "tp") == ["nothing"] * 4


def test_arguments():
    layer = nn.Linear(2, 2)
    pairs = [(layer, "weight")]
    with pytest.raises(TypeError, match="unit"):
        Fisher(pairs)
    with pytest.raises(ValueError, match="unit='sample'"):
        Fisher(pairs, unit="sample")
    with pytest.raises(ValueError, match="power=3"):
        Taylor(pairs, unit="rank_batch", power=3)
    criterion = Fisher(pairs, unit="rank_batch")
    with pytest.raises(RuntimeError, match=r"outside of calibrating\(\)"), criterion.batch():
        pass
    layer.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"Linear\.weight.*frozen"), criterion.calibrating():
        pass
    assert not layer.weight._backward_hooks


def error_of_no_shard(wrapping: str) -> tuple[str, list[str]]:
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    try:
        Fisher([(wrappings.unwrapped(model).l1, "weight")], unit="rank_batch")
        return "nothing", hooks_left(model)
    except NotImplementedError as error:
        return str(error), hooks_left(model)


def test_fsdp1_that_does_not_shard_is_refused():
    ((text, left),) = run_ranks(error_of_no_shard, 1, "fsdp1-1")
    assert "Linear.weight" in text and "NO_SHARD" in text and left == []
