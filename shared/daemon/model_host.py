"""Brings a model up for a daemon: file to weights to runner, and what its peers must agree on.

Runs on the engine thread, since it takes seconds and torch's settings are that thread's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.daemon import gpu_memory
from shared.daemon.devices import CPU_DEVICE, Device, require_device
from shared.daemon.fingerprint import Fields, fingerprint, fingerprint_fields
from shared.kv.layout import RESERVED_BLOCK, KVLayout
from shared.model.llama import Llama
from shared.model.loader import load_model
from shared.model.spec import ModelSpec

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from shared.config import Config
    from shared.model.chat_template import ChatTemplate
    from shared.model.loader import LoadedModel
    from shared.model.tokenizer import Tokenizer
    from shared.states import DaemonName


Workspace = Callable[[ModelSpec, KVLayout], int]
"""Returns how many bytes of a GPU an engine needs beside the weights and the pool."""

SMALLEST_POOL = RESERVED_BLOCK + 2
"""Blocks of a layout whose number of blocks is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelHost:
    """A model in memory, and the layout that its KV cache has under this configuration."""

    name: str
    """The configured path or name."""
    device: Device
    """Where it is."""
    spec: ModelSpec
    model: Llama
    tokenizer: Tokenizer
    template: ChatTemplate | None
    layout: KVLayout
    """Of a pool of the number of blocks that was asked for."""
    fields: Fields
    fingerprint: str

    def summary(self) -> dict[str, str | int]:
        """Return what a log line tells of the loaded model."""
        return {
            "model": self.name,
            "fingerprint": self.fingerprint,
            "num_blocks": self.layout.num_blocks,
            "pool_bytes": self.layout.pool_bytes,
        }


def bring_up(
    config: Config,
    daemon: DaemonName,
    *,
    workspace: Workspace,
    log: FilteringBoundLogger,
    progress: Callable[[int, int], None],
) -> ModelHost:
    """Choose a daemon's device and load the configured model there.

    Args:
        config: The pair's configuration.
        daemon: Whose device and pool.
        workspace: What the daemon's engine needs beside weights and pool.
        log: Told of the device.
        progress: Called with bytes done and bytes in all.

    Raises:
        EnvironmentUnsupportedError: This machine lacks what the configured device needs.
        KvpairError: As `load_model_host`.
    """
    ours = config.prefilld if daemon == "prefilld" else config.decoded
    theirs = config.decoded if daemon == "prefilld" else config.prefilld
    return load_model_host(
        config,
        num_blocks=config.pool.num_blocks if daemon == "prefilld" else config.decoded.num_blocks,
        memory_fraction=ours.memory_fraction,
        workspace=workspace,
        device=require_device(ours.device, peer=theirs.device, log=log),
        progress=progress,
    )


def no_workspace(_spec: ModelSpec, _layout: KVLayout) -> int:
    """Leave no room: for a CPU, whose memory is not given away whole."""
    return 0


def load_model_host(
    config: Config,
    *,
    num_blocks: int,
    memory_fraction: float = 1.0,
    workspace: Workspace = no_workspace,
    device: Device = CPU_DEVICE,
    progress: Callable[[int, int], None] | None = None,
) -> ModelHost:
    """Load the configured model.

    Args:
        config: The pair's configuration.
        num_blocks: Blocks of this daemon's own pool; 0, on a GPU, for what fits into
            `memory_fraction` of what is free once the weights are there and room is left to work.
        memory_fraction: That share.
        workspace: Returns the bytes of that room.
        device: Where the weights go.
        progress: Called with bytes done and bytes in all.

    Raises:
        ModelError: The model is missing, damaged or of a kind that cannot be run.
        LayoutError: The pool cannot have the configured shape.
        PoolAllocationError: A share of the GPU's free memory holds no pool.
        EnvironmentUnsupportedError: The weights do not fit the GPU.
        MemoryShortageError: The same, for others hold its memory.
    """

    def load() -> tuple[LoadedModel, Llama]:
        if device.index is not None:
            torch.cuda.set_device(device.index)  # of the engine thread, which is the caller
        loaded = load_model(
            config.model.path, config.model.dtype, str(device.torch_device), progress=progress
        )
        # The weights are fused first: what is free afterwards is what a pool may have.
        return loaded, Llama(loaded.spec, loaded.tensors)

    loaded, model = gpu_memory.load_as_memory_comes_back(load)
    spec = loaded.spec
    layout = spec.kv_layout(
        num_blocks=num_blocks or SMALLEST_POOL,
        block_size=config.pool.block_size,
        dtype=config.model.dtype,
    )
    if not num_blocks:
        torch.cuda.empty_cache()  # what fusing the weights left behind would not count as free
        needed_bytes = workspace(spec, layout)
        num_fitting = gpu_memory.blocks_that_fit(layout, memory_fraction, needed_bytes=needed_bytes)
        layout = layout.with_num_blocks(num_fitting)
    fields = fingerprint_fields(spec=spec, content_id=loaded.content_id, layout=layout)
    return ModelHost(
        name=config.model.path,
        device=device,
        spec=spec,
        model=model,
        tokenizer=loaded.tokenizer,
        template=loaded.chat_template,
        layout=layout,
        fields=fields,
        fingerprint=fingerprint(fields),
    )
