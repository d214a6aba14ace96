"""PruningCallback in a real Trainer, and what ``from_pretrained`` loads of a pruned model."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import distprune as prune
from distprune import checkpoint, criteria
from distprune.integrations.transformers import PruningCallback
from distprune.recipes import Recipe
from distprune.schedule import OneShot, ScheduledPruner
from distprune.testing import run_ranks
from helpers import tiny_language_model, wrappings
from helpers.comparisons import assert_nothing_wrong, changes, raised, snapshot
from integrations.test_accelerate import SCHEDULE, TAYLOR, as_launched, pretend_fsdp2


def tiny_llama(tied: bool = False) -> LlamaForCausalLM:
    return tiny_language_model.tiny_llama(vocab_size=32, tie_word_embeddings=tied)


def examples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(32, (40, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in tokens]


def make_trainer(folder, callbacks, model=None, **options) -> Trainer:
    settings = {
        "max_steps": 10, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_steps": 4,
        "logging_steps": 5, "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **{**settings, **options})
    return Trainer(model or tiny_llama(), arguments, train_dataset=examples(), callbacks=callbacks)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def equal_states(one, other) -> bool:
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("tied", "criterion"),
    [(False, None), (True, None), (False, criteria.Movement), (False, TAYLOR)],
)
def test_interrupted_and_resumed_equals_undisturbed(tmp_path, tied, criterion):
    def new_callback():
        exclude = [] if tied else ["lm_head"]
        return PruningCallback(
            SCHEDULE,
            include="*",
            exclude=exclude,
            permanent=False,
            verify_every=1,
            criterion=criterion,
        )

    undisturbed = make_trainer(tmp_path / "a", [new_callback()], tiny_llama(tied))
    undisturbed.train()

    first = make_trainer(tmp_path / "b", [new_callback(), StopAt(4)], tiny_llama(tied))
    first.train()
    saved = load_file(tmp_path / "b/checkpoint-4/model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight_mask" in saved
    assert "model.layers.0.mlp.up_proj.weight_orig" in saved
    assert not equal_states(first.model, undisturbed.model)

    callback = new_callback()
    resumed = make_trainer(tmp_path / "b", [callback], tiny_llama(tied))
    resumed.train(resume_from_checkpoint=True)
    assert equal_states(resumed.model, undisturbed.model)
    assert callback.pruner.num_steps == 10
    assert callback.last_report.sparsity == pytest.approx(0.8, abs=1e-3)
    if criterion is not None:
        magnitude = make_trainer(tmp_path / "c", [PruningCallback(SCHEDULE, exclude="lm_head")])
        magnitude.train()
        assert not equal_states(magnitude.model, undisturbed.model)


def test_scopes_and_resetting(tmp_path):
    callback = PruningCallback(
        SCHEDULE,
        exclude="lm_head",
        permanent=False,
        criterion=criteria.SNIP,
        scope="layer",
        reset_criterion=True,
    )
    make_trainer(tmp_path, [callback], max_steps=8, save_strategy="no").train()
    for module, name in callback.pruner.parameters:
        mask = getattr(module, f"{name}_mask")
        assert int((mask == 0).sum()) == round(0.8 * mask.numel())
    assert callback._criterion.num_updates == 0  # step 7 was due, and the last one


class FlipAt(TrainerCallback):
    """Changes a mask behind the back of everybody."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            mask = model.model.layers[1].mlp.up_proj.weight_mask
            mask.view(-1)[3] = 1 - mask.view(-1)[3]


def test_a_mask_that_changes_while_training_stops_it(tmp_path):
    callback = PruningCallback(SCHEDULE, exclude="lm_head", verify_every=5)
    trainer = make_trainer(tmp_path, [callback, FlipAt(8)])
    with pytest.raises(prune.VerificationError, match=r"layers\.1\.mlp\.up_proj\.weight: its mask"):
        trainer.train()
    assert trainer.state.global_step == 10
    with pytest.raises(ValueError, match="verify_every=0"):
        PruningCallback(SCHEDULE, verify_every=0)


def test_the_saved_model_is_plain_and_its_history_has_the_sparsity(tmp_path):
    trainer = make_trainer(tmp_path, [PruningCallback(SCHEDULE, exclude="lm_head")])
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "final")
    assert equal_states(loaded, trainer.model)
    weights = [getattr(m, n) for m, n in prune.select(loaded)]
    count = sum(weight.numel() for weight in weights)
    assert sum(int((weight == 0).sum()) for weight in weights) == round(0.8 * count)

    history = [entry for entry in trainer.state.log_history if "sparsity" in entry]
    assert [entry["step"] for entry in history] == [4, 5, 6, 8, 10]
    assert history[0]["sparsity"] == SCHEDULE.sparsity_at(3) and history[-1]["sparsity"] == 0.8
    saved = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
    state = saved["stateful_callbacks"]["PruningCallback"]["attributes"]["pruning"]
    assert state["num_steps"] == 4


def test_recipes_and_functions(tmp_path):
    recipe = Recipe(sparsity=0.5, exclude="lm_head", normalize="none")
    file = tmp_path / "recipe.yaml"
    file.write_text("sparsity: 0.5\nexclude: lm_head\nnormalize: none\n")

    def make(model):
        return ScheduledPruner(prune.select(model), OneShot(0, 0.5))

    models = []
    for plan in (recipe, file, make, OneShot(0, 0.5)):
        options = {"exclude": "lm_head"} if isinstance(plan, OneShot) else {}
        callback = PruningCallback(plan, permanent=False, **options)
        trainer = make_trainer(tmp_path, [callback], max_steps=1, save_strategy="no")
        trainer.train()
        models.append(trainer.model)
    masks = {key for key in models[0].state_dict() if key.endswith("_mask")}
    assert masks == {f"{pair.fqn}_mask" for pair in prune.select(tiny_llama())}
    assert all(equal_states(model, models[0]) for model in models[1:])
    callback.make_permanent()
    assert models[-1].state_dict().keys() == tiny_llama().state_dict().keys()


def test_what_cannot_work_is_refused_at_the_start(tmp_path, caplog):
    with pytest.raises(TypeError, match="plan is a float"):
        PruningCallback(0.5)
    with pytest.raises(TypeError, match="go with a schedule"):
        PruningCallback(Recipe(**{"sparsity": 0.5}), exclude="lm_head")
    callback = PruningCallback(SCHEDULE)
    for options, text in (
        ({"load_best_model_at_end": True, "save_strategy": "best"}, "load_best_model"),
        ({"restore_callback_states_from_checkpoint": True}, "restore_callback_states"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            make_trainer(tmp_path, [callback], **options)
    arguments = make_trainer(tmp_path, []).args
    object.__setattr__(arguments, "_n_gpu", 2)
    with pytest.raises(NotImplementedError, match="DataParallel"):
        callback.on_init_end(arguments, None, None)
    trainer = make_trainer(tmp_path, [callback])
    object.__setattr__(trainer.args, "fsdp", True)
    with pytest.raises(NotImplementedError, match=r"callback\.attach\(trainer\) before"):
        callback.on_train_begin(trainer.args, None, None, model=trainer.model)
    with pytest.raises(NotImplementedError, match="2 callbacks"):
        make_trainer(tmp_path, [callback, PruningCallback(SCHEDULE)]).train()
    with pytest.raises(TypeError, match="plan returned a list"):
        make_trainer(tmp_path, [PruningCallback(prune.select)]).train()
    with pytest.raises(ValueError, match="'nothing' matches no parameter"):
        make_trainer(tmp_path, [PruningCallback(SCHEDULE, exclude="nothing")]).train()

    # A dense model under the callback of a pruned checkpoint.
    make_trainer(tmp_path, [PruningCallback(SCHEDULE)], max_steps=4).train()
    assert "training ends after 4 steps at sparsity 0.56" in caplog.text
    with pytest.raises(ValueError, match="is missing, with what Taylor has collected"):
        make_trainer(tmp_path, [PruningCallback(SCHEDULE, criterion=TAYLOR)]).train(
            resume_from_checkpoint=True
        )
    late = make_trainer(tmp_path, [])
    late.add_callback(PruningCallback(SCHEDULE))
    with pytest.raises(RuntimeError, match=r"step 4 is pruned to 56.*its masks were not loaded"):
        late.train(resume_from_checkpoint=True)


def trained_on_ranks(folder: str, wrapping: str, criterion) -> dict[str, torch.Tensor]:
    states = []
    for name, stop in (("a", 99), ("b", 4), ("b", 99)):
        with as_launched(FSDP_VERSION="2"):
            callback = PruningCallback(
                SCHEDULE, exclude="lm_head", permanent=False, criterion=criterion, verify_every=1
            )
            trainer = make_trainer(f"{folder}/{name}", [callback, StopAt(stop)])
            assert trainer.args.world_size == 2
            if wrapping == "fsdp2":
                pretend_fsdp2()
                trainer.is_fsdp_enabled = True
                callback.attach(trainer)
            trainer.train(resume_from_checkpoint=len(states) == 2)
            state = trainer.model.state_dict()
            mask = state["model.layers.0.mlp.up_proj.weight_mask"]
            assert isinstance(mask, DTensor) == (wrapping == "fsdp2")
            states.append({key: wrappings.whole(tensor) for key, tensor in state.items()})
    undisturbed, _, resumed = states
    assert undisturbed.keys() == resumed.keys()
    for key, value in undisturbed.items():
        assert torch.equal(value, resumed[key]), key
    return undisturbed


@pytest.mark.parametrize(
    ("wrapping", "criterion"),
    [
        ("ddp", None),
        pytest.param("fsdp2", None, marks=pytest.mark.thorough),
        pytest.param("fsdp2", TAYLOR, marks=pytest.mark.thorough),
    ],
)
def test_two_ranks(tmp_path, wrapping, criterion):
    one, other = run_ranks(trained_on_ranks, 2, str(tmp_path), wrapping, criterion)
    assert all(torch.equal(one[key], other[key]) for key in one)
    masks = [value for key, value in one.items() if key.endswith("_mask")]
    count = sum(mask.numel() for mask in masks)
    assert sum(int((mask == 0).sum()) for mask in masks) == round(0.8 * count)


TOKENS = torch.arange(8).view(1, 8)


def problems(path: str, wrapping: str, tied: bool, dtype: torch.dtype) -> list[str]:
    dense = tiny_llama(tied).to(dtype)
    before = {name: p.detach().clone() for name, p in dense.named_parameters()}
    model = wrappings.wrap(dense, wrapping)
    pairs = prune.select(model, names=["weight"], everything=True)
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.6)
    state = snapshot(model) if dtype is torch.float32 else {}
    wrong = []
    for arguments, kind in [({"state_dict": {}}, "TypeError"), ({"max_shard_size": "x"}, r"\w+: ")]:
        text = raised(lambda given=arguments: checkpoint.save_pretrained(model, path, **given))
        wrong += [f"{arguments}: {text}"] * (not re.match(kind, text))
    checkpoint.save_pretrained(model, path, max_shard_size="1GB")
    after = snapshot(model) if state else {}
    # FSDP1 sets itself up in the first state dict.
    wrong += [each for each in changes(state, after) if "attributes" not in each]
    with torch.no_grad():
        logits = model(TOKENS).logits
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    saved = load_file(f"{path}/model.safetensors")
    wrong += [key for key in saved if key.endswith(("_orig", "_mask"))]
    wrong += ["both names were written"] * (tied and "lm_head.weight" in saved)
    loaded, info = LlamaForCausalLM.from_pretrained(path, output_loading_info=True, dtype="auto")
    wrong += [f"{k}: {v}" for k, v in info.items() if v]
    wrong += [f"dtype {loaded.dtype}"] * (loaded.dtype != dtype)
    for name, value in loaded.named_parameters():
        kept = value != 0
        if not torch.equal(value[kept], before[name][kept]):
            wrong.append(f"{name}: other values")
    zeros = sum(int((p == 0).sum()) for p in loaded.parameters())
    total = sum(p.numel() for name, p in loaded.named_parameters() if "norm" not in name)
    wrong += [f"{zeros} of {total} are zero"] * (zeros != round(0.6 * total))
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    if not torch.allclose(loaded(TOKENS).logits, logits, atol=tolerance):
        wrong.append("other outputs")
    return wrong


@pytest.mark.parametrize(
    ("wrapping", "tied", "dtype"),
    [
        ("plain-2", False, torch.float32), ("ddp-2", True, torch.float32),
        ("fsdp2_root-2", False, torch.float32), ("fsdp2_root-2", True, torch.bfloat16),
        ("fsdp1_root-2", True, torch.float32), ("fsdp1_root-2", False, torch.float32),
    ],
)  # fmt: skip
def test_from_pretrained(tmp_path, wrapping, tied, dtype):
    assert_nothing_wrong(run_ranks(problems, 2, str(tmp_path), wrapping, tied, dtype))


def test_without_a_process_group(tmp_path):
    assert problems(str(tmp_path / "saved"), "plain-1", True, torch.float32) == []
    model = tiny_llama()
    model.config.distributed_config = config = object()
    checkpoint.save_pretrained(model, tmp_path)
    assert model.config.distributed_config is config
    assert "distributed_config" not in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(TypeError, match="a Linear, which has no save_pretrained"):
        checkpoint.save_pretrained(nn.Linear(2, 2), tmp_path)
    tied = tiny_llama(tied=True)
    prune.l1_unstructured(tied.lm_head, "weight", 0.5)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is tied to lm_head\.weight"):
        checkpoint.save_pretrained(tied, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_trainer_tells(tmp_path, caplog):
    trainer = make_trainer(tmp_path, [PruningCallback(SCHEDULE, permanent=False)])
    trainer.train()
    assert "checkpoint.save_pretrained" in caplog.text
    checkpoint.save_pretrained(trainer.model, tmp_path / "model")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded(TOKENS).logits, trainer.model(TOKENS).logits)
