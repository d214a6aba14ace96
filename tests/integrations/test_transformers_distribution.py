"""Models that transformers distributes itself: from_pretrained(distributed_config=...)."""

import os
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

import distprune as prune
from distprune import checkpoint, language_models
from distprune.criteria import SNIP
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong
from helpers.tiny_transformers import save_tiny, tiny_model
from helpers.wrappings import local

transformers = pytest.importorskip("transformers", minversion="5.23")

# By name: the ranks, and the arguments of DistributedConfig.
SIZES = {
    "one": (1, {}),
    "fsdp": (2, {"fsdp_size": 2}),
    "fsdp_of_3": (3, {"fsdp_size": 3}),
    "replicas": (2, {"dp_replicate_size": 2}),
    "tp": (2, {"tp_size": 2}),
    "ep_fsdp": (2, {"ep_size": 2, "fsdp_size": 2}),
    "ep_tp": (2, {"ep_size": 2, "tp_size": 2}),
    "hsdp": (4, {"fsdp_size": 2, "dp_replicate_size": 2}),
    "fsdp_tp": (4, {"fsdp_size": 2, "tp_size": 2}),
    "ep_fsdp_of_4": (4, {"ep_size": 2, "fsdp_size": 4}),
    "ep_fsdp_tp": (4, {"ep_size": 2, "fsdp_size": 2, "tp_size": 2}),
    "ep_over_both": (4, {"ep_size": 4, "fsdp_size": 2, "tp_size": 2}),
}
EXPERTS = ("qwen3_moe", "mixtral")
BY_DEFAULT = [
    ("llama", "fsdp_tp"), ("llama", "replicas"), ("llama", "fsdp_of_3"), ("qwen3_moe", "ep_tp"),
    ("qwen3_moe", "hsdp"), ("mixtral", "ep_fsdp_tp"), ("mixtral", "ep_fsdp"), ("mixtral", "tp"),
    ("qwen3_moe", "tp"),
]  # fmt: skip
CASES = [
    pytest.param(family, name, marks=[] if (family, name) in BY_DEFAULT else [pytest.mark.thorough])
    for family in ("llama", *EXPERTS)
    for name in SIZES
    if name.startswith("ep") <= (family in EXPERTS)
    and not (family in EXPERTS and name == "fsdp_of_3")  # it cannot load four experts on three
]
# Where each expert is on one rank, transformers 5.23 divides its gradient twice, pruned or not.
HALVED = ("ep_fsdp", "ep_over_both")
NUM_STEPS = 10
TOLERANCE = 1e-10  # float64; the ranks add up in another order


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a family, a checkpoint, and one whose values are the indices of the elements."""

    @cache
    def folders_of(family):
        folder = tmp_path_factory.mktemp(family)
        save_tiny(family, folder / "model")
        model = tiny_model(family)
        for parameter in model.parameters():
            parameter.data = torch.arange(parameter.numel()).view(parameter.shape).float()
        model.save_pretrained(folder / "indices")
        return folder

    return folders_of


def load(folder, sizes=None):
    options = {}
    if sizes is not None:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(**sizes)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", **options
    )


def keep_router_in_float64():
    """Else it rounds to float32, and ranks with parts of experts add up such gradients."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    def forward(self, hidden_states):
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        scores, indices = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True), indices

    MixtralTopKRouter.forward = forward


class Pair:
    """A distributed model and a whole one, with the same masks; and what is wrong."""

    def __init__(self, folder, name):
        sizes = SIZES[name][1]
        self.halves_experts = name in HALVED
        if folder.name.startswith("mixtral"):
            keep_router_in_float64()
        self.dense = load(folder / "model")
        self.indices = {
            name: local(parameter).long()
            for name, parameter in load(folder / "indices", sizes).named_parameters()
        }
        self.model = load(folder / "model", sizes)
        self.names = [pair.fqn for pair in prune.select(self.model)]
        self.keeps: dict[str, Tensor] = {}
        self.wrong: list[str] = []
        num_parts = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
        part = dist.get_rank() // sizes.get("tp_size", 1)
        self.part, self.num_parts = part, num_parts
        batches = torch.randint(40, (NUM_STEPS, 12, 8), generator=torch.Generator().manual_seed(1))
        self.batches = list(batches)

    def places(self, model):
        paths = [name.rpartition(".") for name in self.names]
        return [(model.get_submodule(path), name) for path, _, name in paths]

    def mine(self, name, whole):
        return whole.detach().view(-1)[self.indices[name]]

    def my_rows(self, batch):
        return batch.chunk(self.num_parts)[self.part]

    def prune(self, amount, scores=None, importance_scores=None):
        """Prune both; by the oracle the whole one."""
        places = self.places(self.dense)
        if scores is None:
            key = "_orig" if self.keeps else ""
            scores = [getattr(module, name + key) for module, name in places]
        masks = list(self.keeps.values()) or None
        keeps = reference.prune(scores, amount, masks)
        for (module, name), keep in zip(places, keeps, strict=True):
            torch_prune.custom_from_mask(module, name, keep)
        report = prune.global_unstructured(
            prune.select(self.model), prune.L1Unstructured, importance_scores, amount=amount
        )
        self.keeps = dict(zip(self.names, keeps, strict=True))
        assert report.num_pruned == sum(int((~keep).sum()) for keep in keeps), report
        self.compare("pruned")

    def compare(self, when):
        dense = {n.removesuffix("_orig"): p for n, p in self.dense.named_parameters()}
        for (module, name), full in zip(self.places(self.model), self.names, strict=True):
            if not self.keeps:
                break
            mask = local(getattr(module, name + "_mask"))
            wrong = int((mask != self.mine(full, self.keeps[full])).sum())
            if wrong:
                self.wrong.append(f"{when}: {wrong} elements of the mask of {full}")
            effective = local(getattr(module, name))
            if effective[~self.mine(full, self.keeps[full])].any():
                self.wrong.append(f"{when}: pruned elements of {full} are not zero")
        for name, parameter in self.model.named_parameters():
            name = name.removesuffix("_orig")
            if name in self.keeps:  # zeros are held in shards
                dense[name].data.mul_(self.keeps[name])
            expected = self.mine(name, dense[name])
            if not torch.allclose(local(parameter), expected, rtol=0, atol=TOLERANCE):
                off = (local(parameter) - expected).abs().max()
                self.wrong.append(f"{when}: {name} is off by {off:.3g}")

    def backward(self, batch):
        for model, rows in ((self.model, self.my_rows(batch)), (self.dense, batch)):
            # A sum: softmax and norms are in float32, so that gradients have to be the same there.
            logits, labels = model(input_ids=rows).logits[:, :-1], rows[:, 1:]
            loss = nn.functional.cross_entropy(logits.mT, labels, reduction="sum") / 64
            loss.backward()
        for parameter in self.dense.parameters():
            parameter.grad /= self.num_parts
        for name, parameter in self.dense.named_parameters() if self.halves_experts else ():
            if ".experts." in name:
                parameter.grad /= 2


def life(folder, name):
    pair = Pair(folder, name)
    model, dense = pair.model, pair.dense
    pair.compare("loaded")
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2, 0.9, foreach=False) for m in (model, dense)]
    pair.prune(0.5)
    for step, batch in enumerate(pair.batches):
        pair.backward(batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.compare(f"step {step}")
        if step == 4:
            pair.prune(0.5)
    prune.verify(model)
    return pair.wrong


@pytest.mark.parametrize(("family", "name"), CASES)
def test_is_pruned_and_trained_as_on_one_process(folders, family, name):
    for wrong in run_ranks(life, SIZES[name][0], folders(family), name):
        assert not wrong, wrong[:5]


def use(folder, name, other, target):
    """Everything else that is done with a pruned model, after it was loaded."""
    pair = Pair(folder, name)
    model, dense = pair.model, pair.dense
    wrong = pair.wrong

    # Calls for one parameter, at once after loading.
    both = zip(pair.places(model), pair.places(dense), pair.names, strict=True)
    for (module, own), (whole, _), full in both:
        for each in (module, whole):
            prune.l1_unstructured(each, own, amount=0.4)
        pair.keeps[full] = getattr(whole, own + "_mask").bool()
    pair.compare("single calls")

    # A criterion of averaged gradients, and statistics of inputs.
    batch = pair.batches[0]
    scores = []
    for each, rows in ((model, pair.my_rows(batch)), (dense, batch)):
        linear = prune.select(each, types=nn.Linear)
        criterion = SNIP(prune.select(each))
        each(input_ids=rows, labels=rows).loss.backward()
        criterion.update()
        each.zero_grad()
        statistics = prune.statistics.ActivationStatistics(linear)
        with statistics.collecting(), torch.no_grad():
            each(input_ids=rows)
        wanda = statistics.wanda()
        kept = prune.global_mask(linear, 1000, scores=[wanda[pair] for pair in linear])
        scores.append([*criterion.scores().values(), *kept.masks])
    names = [*pair.names, *(each.fqn for each in linear)]
    for full, ours, theirs in zip(names, *scores, strict=True):
        if not torch.allclose(local(ours), pair.mine(full, theirs), rtol=1e-8, atol=1e-12):
            wrong.append(f"scores or mask of {full}")

    # Checkpoints: resharded by DCP, and what plain transformers loads.
    if other is None:
        with pytest.raises(NotImplementedError, match=r"gate_up_proj.* groups of rows"):
            checkpoint.get_state_dict(model)
    else:
        dcp.save(checkpoint.get_state_dict(model), checkpoint_id=target / "dcp")
        resharded = Pair(folder, other)
        checkpoint.load(target / "dcp", resharded.model)
        resharded.dense, resharded.keeps = dense, pair.keeps
        resharded.compare("resharded")
        prune.verify(resharded.model)
        wrong += resharded.wrong
    checkpoint.save_pretrained(model, target / "pruned")
    language_models.save_sharded(model, target / "sharded", source=folder / "model")
    for place in pair.places(model):
        prune.remove(*place)
    model.save_pretrained(target / "removed")
    model.save_pretrained(target / "distributed", distributed_checkpoint=True)
    again, whole = load(target / "distributed", SIZES[name][1]), dense.state_dict()
    for full, parameter in again.named_parameters():
        expected = whole.get(full)
        if expected is None:
            expected = whole[full + "_orig"] * whole[full + "_mask"]
        if not torch.equal(local(parameter), pair.mine(full, expected)):
            wrong.append(f"removed, saved and loaded: {full}")
    return wrong


@pytest.mark.parametrize(
    ("family", "name", "other"),
    [
        pytest.param("llama", "fsdp_tp", "hsdp", marks=pytest.mark.thorough),
        ("qwen3_moe", "ep_tp", "fsdp"),
        ("mixtral", "ep_fsdp_tp", "hsdp"),
        ("qwen3_moe", "tp", None),  # DCP cannot store experts that are cut by columns
    ],
)
def test_scores_and_checkpoints(folders, tmp_path, family, name, other):
    if other is None and torch.__version__ < "2.13":
        pytest.skip("this torch cannot gather a part of each of several groups of rows")
    folder = folders(family)
    for wrong in run_ranks(use, SIZES[name][0], folder, name, other, tmp_path):
        assert not wrong, wrong[:5]
    saved = [load(tmp_path / kind).state_dict() for kind in ("removed", "pruned", "sharded")]
    for name, tensor in saved[0].items():
        assert all(torch.equal(other[name], tensor) for other in saved[1:]), name
    assert any((tensor == 0).any() for tensor in saved[0].values())


def train_with_the_trainer(folder) -> list[str]:
    """The callback prunes a model that is sharded already; what is saved is an ordinary one."""
    from test_transformers import SCHEDULE, make_trainer

    from distprune.integrations.transformers import PruningCallback

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29988"}
    model = load(folder / "model", {"fsdp_size": 2})
    callback = PruningCallback(SCHEDULE, verify_every=1)
    # transformers 5.23 refuses to save what it could not resume.
    trainer = make_trainer(folder / "runs", [callback], model, save_strategy="no")
    trainer.train()
    trainer.save_model(str(folder / "trained"))
    dist.barrier()
    weights = [m.weight for m, _ in prune.select(load(folder / "trained"))]
    number = sum(int((weight == 0).sum()) for weight in weights)
    expected = round(0.8 * sum(weight.numel() for weight in weights))
    return [] if number == expected else [f"{number} weights are zero, expected {expected}"]


def test_the_trainer_takes_such_a_model(folders):
    assert_nothing_wrong(run_ranks(train_with_the_trainer, 2, folders("llama")))
