"""Numbers on their way to a device."""

from __future__ import annotations

import numpy as np
import torch

from shared.ops.transfer import to_device


def test_numbers_arrive_as_they_are() -> None:
    """On a CPU they are not even copied."""
    numbers = np.array([[1, 2], [3, 4]], dtype=np.int64)
    tensor = to_device(numbers, torch.device("cpu"))
    assert torch.equal(tensor, torch.tensor([[1, 2], [3, 4]]))
    assert tensor.data_ptr() == numbers.ctypes.data
