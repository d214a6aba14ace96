"""The wrappers of other libraries: DeepSpeed's ZeRO, and transformers' own distribution.

They are tried where the library is installed, on the accelerator of this machine if it has one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distprune._common.pruned_form import local_tensor

LEARNING_RATE = 0.1  # of SGD, which DeepSpeed has to know when it wraps a model


def why_not(library: str, device: torch.device, backend: str) -> str:
    """Why the wrappers of a library cannot be tried on this rank; "" if they can."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and (device.type == "cpu" or backend == "gloo"):
        return f"{library} takes an accelerator for each rank"
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        _imported(library)
    except Exception as error:  # libraries raise what they like
        return f"needs {library}: {error}"
    return ""


def zero(net: nn.Module, stage: int) -> nn.Module:
    """DeepSpeed's engine for a model, with SGD."""
    deepspeed = _imported("deepspeed")
    # Nothing is compiled: for ranks of one machine it is a faster all-reduce, after minutes.
    _imported("deepspeed.comm.torch").build_shm_op = lambda: None
    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer, linear = torch.optim.SGD(net.parameters(), LEARNING_RATE), nn.functional.linear
    try:
        engine: nn.Module = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    finally:
        nn.functional.linear = linear  # ZeRO-3 replaces it for all that comes later
    return engine


def distributed_by_transformers(net: nn.Module, **sizes: int) -> nn.Module:
    """A model with the layers of another one, saved, and loaded with ``distributed_config``."""
    transformers = _imported("transformers")

    class Pretrained(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
        config_class = transformers.PretrainedConfig
        forward = type(net).forward

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            layer: Any
            for name, layer in net.named_children():
                self.add_module(name, nn.Linear(layer.in_features, layer.out_features))
            self.post_init()

    plans = {
        "tp_plan": {"l1": "colwise", "l2": "rowwise"},
        "fsdp_plan": dict.fromkeys(("l1", "l2", "l3"), "free_full_weight"),
    }
    with tempfile.TemporaryDirectory() as folder:
        transformers.PretrainedConfig().save_pretrained(folder)
        path = os.path.join(folder, "model.safetensors")
        _imported("safetensors.torch").save_file(net.state_dict(), path, metadata={"format": "pt"})
        config = transformers.DistributedConfig(**sizes, **plans)
        loaded: nn.Module = Pretrained.from_pretrained(folder, distributed_config=config)
    return loaded


def held(tensor: Tensor) -> Tensor:
    """What this rank has of a parameter, 1-d if ZeRO-3 has cut it, or of a tensor beside it."""
    part: Any = getattr(tensor, "ds_tensor", None)
    if part is None:
        return local_tensor(tensor.detach())
    rest = tensor.ds_numel - dist.get_rank() * part.numel()  # type: ignore[attr-defined]
    run: Tensor = part.detach()[: max(0, rest)]
    return run


def _imported(library: str) -> Any:
    """A library, whose log does not go to the standard output.

    Raises:
        AttributeError: transformers is older than 5.23, and does not distribute all of it.
    """
    with contextlib.redirect_stdout(sys.stderr):
        module: Any = importlib.import_module(library)
    if library == "transformers":
        _ = module.DistributedConfig.efsdp_size
        module.utils.logging.disable_progress_bar()
        module.utils.logging.set_verbosity_error()
    if library == "deepspeed":
        module.utils.logger.setLevel("ERROR")
    return module
