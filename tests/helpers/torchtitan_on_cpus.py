"""torchtitan's own trainer on CPUs and gloo, with synthetic data.

Four things are replaced: the device (torchtitan takes an accelerator for granted), attention
(flex_attention has no backward on CPUs), what reads data sets, and the log for TensorBoard.
"""

import dataclasses
import os
import sys
import types
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule

NUM_STREAMS = 4  # of batches, over all data-parallel ranks


class _Absent(types.ModuleType):
    """A module that is not installed, and not needed: every name is an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _pretend() -> None:
    for name in ("torch.utils.tensorboard", "datasets", "datasets.distributed"):
        sys.modules.setdefault(name, _Absent(name))
    torch._utils._get_available_device_type = lambda: "cpu"
    properties = types.SimpleNamespace(name="cpu", total_memory=1 << 33)
    made = {
        "get_device_name": "cpu", "get_device_properties": properties, "empty_cache": None,
        "reset_peak_memory_stats": None, "memory_stats": {}, "memory_allocated": 0,
    }  # fmt: skip
    for name, value in made.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *_, value=value: value)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple:
    grouped = options.get("enable_gqa", False)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, enable_gqa=grouped), mock.Mock(lse=None)


def shrink(config: Any) -> None:
    """Make a config of a mixture small, in place: 4 experts, of which a token takes 2."""
    sizes = {("num_experts", 64): 4, ("out_features", 64): 4, ("hidden_dim", 768): 32}
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        value = getattr(config, field.name)
        if field.name == "top_k":
            config.top_k = 2
        elif isinstance(value, int):
            setattr(config, field.name, sizes.get((field.name, value), value))
        for each in value if isinstance(value, list) else [value]:
            shrink(each)


def trainer_of(config: Any, folder: str, **parallelism: int) -> Any:
    """Build the trainer of a config of a small model, for ten steps of small batches."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import FlexAttention

    class Data(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_world_size, dp_rank, seq_len, **_):
            self.streams = range(dp_rank, NUM_STREAMS, dp_world_size)
            self.length, self.number = seq_len + 1, 0

        def __iter__(self):
            while True:
                seeds = [self.number * NUM_STREAMS + stream for stream in self.streams]
                made = [torch.Generator().manual_seed(seed) for seed in seeds]
                rows = [torch.randint(2000, (self.length,), generator=each) for each in made]
                self.number += 1
                tokens = torch.stack(rows)
                places = torch.arange(self.length - 1).expand(len(rows), -1)
                yield {"input": tokens[:, :-1], "positions": places}, tokens[:, 1:]

        def state_dict(self):
            return {"number": self.number}

        def load_state_dict(self, state_dict):
            self.number = state_dict["number"]

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **_):
            super().__init__()

        encode = decode = lambda self, *_: []

        def get_vocab_size(self):
            return 2048

    FlexAttention._compiled_flex_attn = staticmethod(_causal)
    utils.set_pg_timeouts = lambda **_: None  # its barrier names a device by number
    config.dataloader, config.tokenizer = Data.Config(), Tokenizer.Config()
    config.dump_folder, training = folder, config.training
    training.seq_len, training.steps, training.disable_cuda_graphs = 16, 10, True
    training.mixed_precision_param = "float32"
    size = parallelism.get("tensor_parallel_degree", 1)
    training.local_batch_size = NUM_STREAMS * size // int(os.environ["WORLD_SIZE"])
    config.optimizer.implementation = "for-loop"
    config.validator.enable = config.compile.enable = False
    config.checkpoint.enable, config.checkpoint.interval = True, 4
    config.checkpoint.last_save_model_only = True
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):  # gloo cannot multiply what it adds up
                module.set_force_sum_reduction_for_comms(True)
    return trainer


_pretend()
