"""On a CPU everything here is a rehearsal: sizes are small, and nothing may run beside anything."""

import pytest


@pytest.fixture
def is_small(device):
    return device.type == "cpu"
