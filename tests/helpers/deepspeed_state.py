"""What DeepSpeed keeps in a process, where tests run one after the other with other groups."""

import importlib


def forget() -> None:
    """Let DeepSpeed start anew with the process group of this test, and compile nothing."""
    import deepspeed

    communication = importlib.import_module("deepspeed.comm.torch")
    communication.build_shm_op = lambda: None
    importlib.import_module("deepspeed.comm.comm").cdb = None
    groups = importlib.import_module("deepspeed.utils.groups")
    for name, value in vars(groups).items():
        if name.startswith("_") and name.isupper() and not callable(value):
            setattr(groups, name, {} if isinstance(value, dict) else None)
    # DeepSpeed counts modules and parameters of a process, and compares the numbers of the ranks.
    offload = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    deepspeed.zero.Init.param_id = 0
