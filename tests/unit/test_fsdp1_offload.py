"""With CPU offload FSDP1 has masks, slices and what it gathers on two devices.

The meta device stands for the accelerator: it has no values, and refuses to be mixed with the CPU
as any other device does.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from distprune.base.pruned_form import mask_key, orig_key
from distprune.shards.reader import ShardReader
from distprune.wrappers.fsdp1_mask import FlatMask, masked_slice

SIZE = 10


def spans(device="cpu"):
    """Of two runs, with a gap between them, and masks on a device."""
    for first, size in ((1, 4), (6, 3)):
        yield slice(first, first + size), (torch.arange(size, device=device) % 2 == 0)


def expected(source):
    keep = torch.ones(SIZE, dtype=torch.bool)
    for span, mask in spans():
        keep[span] = mask
    return source * keep


@pytest.mark.parametrize("masks_on", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_gathered_elsewhere_is_masked_there(masks_on, dtype):
    source = torch.arange(1.0, SIZE + 1)
    dense = source.to("meta", dtype)
    masked = masked_slice(dense, source, spans(masks_on))
    assert masked.device.type == "meta" and masked.dtype == dtype
    assert masked is dense  # it is a copy already
    assert torch.equal(source, torch.arange(1.0, SIZE + 1))


def test_the_slice_itself_is_not_written_to():
    source = torch.arange(1.0, SIZE + 1)
    masked = masked_slice(source, source.detach(), spans())
    assert torch.equal(masked, expected(source))
    assert torch.equal(source, torch.arange(1.0, SIZE + 1))


def test_a_copy_in_low_precision_is_rounded_after_the_product():
    source = torch.full((SIZE,), 1e6)  # inf in float16
    masked = masked_slice(source.half(), source, spans())
    assert torch.equal(masked, expected(source).half())
    assert not masked.isnan().any()


def test_the_value_is_computed_where_the_parameter_is():
    module = nn.Module()
    module.register_parameter(orig_key("weight"), nn.Parameter(torch.empty(3, device="meta")))
    module.register_buffer(mask_key("weight"), torch.ones(3, dtype=torch.bool))
    handle = SimpleNamespace(_training_state=None)
    piece = SimpleNamespace(handle=handle, owners=[(module, orig_key("weight"))])
    assert FlatMask(piece).value(module, "weight").device.type == "meta"


def test_a_shard_has_its_mask_where_its_values_are():
    piece = SimpleNamespace(
        shape=torch.Size((3,)), stride=(1,), start=0, replica=(0, 1), layout="a run", key=None,
        values=torch.empty(3, device="meta"), groups=(), ranks=(0,),
    )  # fmt: skip
    shard = ShardReader()._read_run(piece, "weight", torch.ones(3, dtype=torch.bool))
    assert shard.mask.device == shard.values.device
