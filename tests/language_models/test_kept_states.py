"""States after the steps of a pruning: as a whole or not at all, on any sharding."""

import pytest
import torch

import distprune as prune
from distprune import language_models
from distprune.language_models import KeptStates
from distprune.testing import run_ranks
from helpers.tiny_language_model import save_tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("kept") / "llama")


def opened(llama, wrap="none"):
    model = language_models.load_sharded(llama, wrap=wrap)
    return model, prune.select(model)


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)().detach()


def state_of(pairs):
    """Weights as they act, and how many are masked."""
    weights = [
        whole(getattr(module, f"{name}_orig", getattr(module, name))) for module, name in pairs
    ]
    masks = [getattr(module, f"{name}_mask", None) for module, name in pairs]
    return weights, [None if mask is None else whole(mask) == 0 for mask in masks]


def keep_two(llama, place, wrap):
    """A step that prunes everything, and one that prunes more."""
    model, pairs = opened(llama, wrap)
    kept, states = KeptStates(model, place), []
    for number, amount in enumerate((0.25, 0.5)):
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=amount)
        kept.save(number)
        states.append(state_of(pairs))
    return states


def load(llama, place, wrap, number):
    model, pairs = opened(llama, wrap)
    kept = KeptStates(model, place)
    finished = kept.finished(5)
    kept.load(number)
    return finished, state_of(pairs), prune.verify(model).ok


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one[0] + one[1], other[0] + other[1], strict=True))


def test_any_sharding_goes_on_from_a_step(llama, tmp_path):
    (expected, *_) = run_ranks(keep_two, 2, llama, tmp_path, "fsdp2")
    for number in (0, 1):
        finished, found, is_good = load(llama, tmp_path, "none", number)
        assert finished == 2 and same(found, expected[number]) and is_good
    for finished, found, _ in run_ranks(load, 2, llama, tmp_path, "fsdp2", 0):
        assert finished == 2 and same(found, expected[0])


def test_a_step_of_some_parameters_leaves_the_others(llama, tmp_path):
    model, pairs = opened(llama)
    prune.global_unstructured(pairs[:3], prune.L1Unstructured, amount=0.5)
    KeptStates(model, tmp_path, "block-{}".format).save(0, pairs[:3])
    size = sum(file.stat().st_size for file in (tmp_path / "block-0").iterdir())
    assert size < 0.5 * sum(p.nbytes for p in model.parameters())
    again, others = opened(llama)
    kept = KeptStates(again, tmp_path, "block-{}".format)
    assert kept.finished(9) == 1
    kept.load(0)
    assert same_where_there(state_of(others), state_of(pairs))
    kept.remove(0)
    kept.remove(0)
    assert kept.finished(9) == 0


def same_where_there(one, other):
    masks = [(a is None) == (b is None) for a, b in zip(one[1], other[1], strict=True)]
    return all(masks) and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_a_state_is_there_as_a_whole_or_not_at_all(llama, tmp_path, monkeypatch):
    from torch.distributed.checkpoint import state_dict_saver as saver

    model, pairs = opened(llama)
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
    kept, save = KeptStates(model, tmp_path), saver.save

    def broken(state, checkpoint_id):
        save(state, checkpoint_id=checkpoint_id)
        raise OSError("the disk is full")

    monkeypatch.setattr(saver, "save", broken)
    with pytest.raises(OSError, match="disk is full"):
        kept.save(0)
    assert kept.finished(1) == 0
    monkeypatch.setattr(saver, "save", save)
    kept.save(0)
    assert kept.finished(1) == 1 and [p.name for p in tmp_path.iterdir()] == ["step-0"]
