"""global_mask selects on every wrapping what one process selects; errors are on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, kind_of
from helpers.models import Net, ShapesNet, fill, fqns, target
from helpers.sampling import every


def selected(tensors, k, candidates, largest):
    """The oracle: True is selected."""
    num = sum(int(mask.sum()) for mask in candidates)
    kept = reference.prune(tensors, num - k if largest else k, candidates)
    if largest:
        return kept
    return [mask & ~keep for mask, keep in zip(candidates, kept, strict=True)]


def differing(found, wanted, indices, names, when):
    wrong = []
    for name, mask, whole in zip(names, found, wanted, strict=True):
        part = wrappings.my_part(whole, indices[name])
        held = wrappings.local(mask)
        if held.dtype is not torch.bool or not torch.equal(held, part):
            wrong.append(f"{when} {name}: {held.tolist()} is not {part.tolist()}")
    return wrong


def differences(wrapping: str, data: str, dtype: str, *, as_tensors: bool) -> list[str]:
    if as_tensors:
        dense = fill(Net(wrappings.runnable_sizes(wrapping)), data, dtype)
    else:
        is_plain_net = "dim1" in wrapping
        dense = Net(wrappings.runnable_sizes(wrapping)) if is_plain_net else ShapesNet()
        fill(dense, data, dtype)
    names = fqns(dense)
    whole = [dense.get_parameter(name).detach().clone() for name in names]
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(dense, wrapping)
    inner = wrappings.unwrapped(model)
    if as_tensors:
        tensors = [inner.get_parameter(name) for name in names]
    else:
        tensors = [target(inner, name) for name in names]
    generator = torch.Generator().manual_seed(2)
    some = [torch.rand(t.shape, generator=generator) < 0.7 for t in whole]
    everything = [torch.ones(t.shape, dtype=torch.bool) for t in whole]
    total = sum(t.numel() for t in whole)
    wrong = []
    for k in (total // 3, total // 3 + 1, 0, total):
        found = prune.global_mask(tensors, k)
        wrong += differing(found.masks, selected(whole, k, everything, True), indices, names, k)
    for mask, tensor in zip(found.masks, tensors, strict=True):
        if isinstance(tensor, DTensor) and mask.placements != tensor.placements:
            wrong.append(f"{mask.placements} is not {tensor.placements}")
    # Among candidates, as whole tensors and as they are laid out; the smallest.
    k = total // 4
    for largest in (True, False):
        wanted = selected(whole, k, some, largest)
        found = prune.global_mask(tensors, k, candidates=some, largest=largest)
        wrong += differing(found.masks, wanted, indices, names, f"candidates {largest}")
    kept = prune.global_mask(tensors, total // 5).masks
    rest = prune.global_mask(tensors, 5, candidates=kept)
    wanted = selected(whole, 5, selected(whole, total // 5, everything, True), True)
    wrong += differing(rest.masks, wanted, indices, names, "of masks")
    return wrong


DATA = [("rounded", "float32"), ("equal", "bfloat16"), ("normal", "mixed"), ("few", "float16")]


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.ALL + wrappings.FSDP2_DIM1))
@pytest.mark.parametrize("as_tensors", [False, True], ids=["pairs", "tensors"])
def test_any_wrapping(wrapping, as_tensors):
    if as_tensors and "fsdp1" in wrapping:
        pytest.skip("refused: test_runs_of_fsdp1_are_refused_without_their_module")
    data = [d for d in DATA if d[1] != "mixed" or "root" not in wrapping]
    number = wrappings.sampled(wrappings.ALL + wrappings.FSDP2_DIM1).index(wrapping)
    for kind, dtype in every(4, data, number):
        if "fsdp1" in wrapping and dtype == "mixed":
            dtype = "float32"
        assert_nothing_wrong_on(wrapping, differences, kind, dtype, as_tensors=as_tensors)


def random_selection(wrapping: str) -> list:
    dense = fill(Net(wrappings.runnable_sizes(wrapping)), "equal", "float32")
    names = fqns(dense)
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(dense, wrapping)
    torch.manual_seed(7 + dist.get_rank())  # the leader's seed counts
    pairs = [target(wrappings.unwrapped(model), name) for name in names]
    found = prune.global_mask(pairs, 60, scores="random")
    held = [wrappings.local(mask) for mask in found.masks]
    return [(m.flatten(), indices[n].flatten()) for m, n in zip(held, names, strict=True)]


@pytest.mark.parametrize("wrapping", ["ddp-3", "fsdp1_root-3", "fsdp2-3", "hsdp-2x2", "tp-2"])
def test_random_scores_do_not_depend_on_the_sharding(wrapping):
    sizes = wrappings.runnable_sizes(wrapping)
    model = Net(sizes)
    torch.manual_seed(7)
    pairs = [target(model, name) for name in fqns(model)]
    whole = prune.global_mask(pairs, 60, scores="random").masks
    for of_rank in run_ranks(random_selection, wrappings.world_size(wrapping), wrapping):
        for (held, indices), mask in zip(of_rank, whole, strict=True):
            assert torch.equal(held, mask.flatten()[indices])


def in_a_hook_of_the_optimizer(wrapping: str) -> list[str]:
    """What ADMM does: a projection in each step."""
    model = wrappings.wrap(
        fill(Net(wrappings.runnable_sizes(wrapping)), "normal", "float32"), wrapping
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pairs = prune.select(model)
    found, wrong = [], []

    def project(*_):
        found.append(prune.global_mask(pairs, 50))

    optimizer.register_step_post_hook(project)
    for _ in range(3):
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if [m.tolist() for m in map(wrappings.local, found[-1].masks)] != [
            m.tolist() for m in map(wrappings.local, prune.global_mask(pairs, 50).masks)
        ]:
            wrong.append("the masks in the hook are others")
    return wrong if len(found) == 3 else ["the hook did not run"]


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "tp-2"])
def test_in_a_hook_of_the_optimizer(wrapping):
    assert_nothing_wrong(run_ranks(in_a_hook_of_the_optimizer, 2, wrapping))


def error_of(what: str) -> tuple[str, str]:
    rank = dist.get_rank()
    model = wrappings.wrap(
        fill(Net(), "normal", "float32"), "fsdp1-2" if "fsdp1" in what else "fsdp2-2"
    )
    weights = {pair.fqn: pair[0].weight for pair in prune.select(model)}
    options = {"k": 20}
    match what:
        case "k":
            options["k"] = 20 + rank
        case "largest":
            options["largest"] = rank == 0
        case "nan":
            if rank:
                weights["l2.weight"].data.to_local()[0, 0] = torch.nan
        case "replicas":
            weights["plain"] = torch.full((3,), float(rank))
        case "candidates":
            options["candidates"] = {"l1.weight": torch.arange(60).view(10, 6) > 9 + rank}
        case "too many":
            options["k"] = 10**6
        case "keys":
            if rank:
                weights["another"] = weights.pop("l2.weight")
    before = {name: wrappings.local(w).clone() for name, w in weights.items()}
    try:
        prune.global_mask(weights, **options)
    except (ValueError, NotImplementedError) as error:
        same = all(
            torch.equal(wrappings.local(w).nan_to_num(), before[name].nan_to_num())
            for name, w in weights.items()
        )
        prune.global_mask({"plain": torch.ones(5)}, 2)  # nobody waits in a collective
        return (kind_of(error), str(error)) if same else ("changed", "")
    return "nothing", ""


ERRORS = {
    "k": "k:",
    "largest": "largest",
    "nan": r"the scores of l2.weight (1 of 50) are NaN",
    "replicas": "plain: the ranks hold replicas",
    "candidates": "l1.weight",
    "too many": "k is 1,000,000, and 125 elements compete",
    "keys": "l2.weight",
    "fsdp1": "expected a (module, name) pair",
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_are_raised_on_all_ranks(what):
    for kind, text in run_ranks(error_of, 2, what):
        assert kind == ("NotImplementedError" if what == "fsdp1" else "ValueError"), (kind, text)
        assert ERRORS[what] in text


def traffic() -> tuple[int, int]:
    model = wrappings.wrap(fill(Net((200, 400, 300, 8)), "normal", "float32"), "fsdp2-2")
    weights = [pair[0].weight for pair in prune.select(model)]
    with Traffic() as seen:
        found = prune.global_mask(weights, 50_000)
    assert found.num_collectives == len(seen.calls) and found.bytes_sent == seen.num_bytes
    return found.num_collectives, found.bytes_sent


def test_few_small_collectives():
    num_collectives, bytes_sent = run_ranks(traffic, 2)[0]
    assert num_collectives <= 12 and bytes_sent < 150_000


def runs_of_fsdp1_are_refused() -> list[str]:
    model = wrappings.wrap(fill(Net(), "normal", "float32"), "fsdp1-2")
    texts = []
    for tensor in (next(model.parameters()), model.l1._fsdp_wrapped_module.weight):
        try:
            prune.global_mask([tensor], 3)
        except NotImplementedError as error:
            texts.append(str(error))
    return texts


def test_runs_of_fsdp1_are_refused_without_their_module():
    for texts in run_ranks(runs_of_fsdp1_are_refused, 2):
        assert len(texts) == 2 and all("(module, name) pair" in text for text in texts)


def uneven_strided_shards() -> str:
    """A DTensor alone does not tell whether FSDP2 made such a cut, or a view did."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), "fsdp2_tp-2x2")
    prune.global_mask([(model.l1, "weight")], 3)
    try:
        prune.global_mask({"l1.weight": model.l1.weight}, 3)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_uneven_shards_over_tensor_parallel_ones_need_their_module():
    for text in run_ranks(uneven_strided_shards, 4):
        assert "l1.weight" in text and "_StridedShard" in text
