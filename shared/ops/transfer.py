"""Numbers from the host to a device, without waiting for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Return the numbers on a device, without waiting for work that is enqueued there."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cpu":
        return tensor
    # Torch keeps pinned memory until the device has read it; pageable memory it would wait for.
    return tensor.pin_memory().to(device, non_blocking=True)
