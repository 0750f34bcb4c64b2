"""The same request at the bottom and at the top of large pools, through both daemons' engines.

One process has both, as the daemons assemble them: which blocks a request gets is then in our
hands, through the allocator's own order.  CUDA IPC does not open where it was made, so what stands
for the mapping is the pool itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from decoded.decode_engine import make_decode_engine
from decoded.lease_effects import BlockCopy
from decoded.turns import CopyJob
from prefilld.prefill_engine import make_prefill_engine
from shared.config.schema import Config, DecodedConfig, ModelConfig, PrefilldConfig
from shared.daemon.devices import Device
from shared.daemon.model_host import SMALLEST_POOL, load_model_host
from shared.engine.batch import SequenceStep
from shared.engine.decoding import DecodeStep
from shared.kv.allocator import BlockAllocator
from shared.ops.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from decoded.link import LinkSession
    from shared.kv.layout import DTypeName

GREEDY = SamplingParams()
TOKEN_BUDGET = 256
NUM_TOKENS = 40
"""Of the answer; over two blocks' ends."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """Where a request's blocks lay, and what was computed there."""

    sources: list[int]
    """In prefilld's pool."""
    targets: list[int]
    """In decoded's."""
    ids: list[int]
    """The answer, with the blocks pulled."""
    prompt_kv: Tensor
    """Prefilld's blocks of it, as bits."""
    kv: Tensor
    """Decoded's, the answer's keys and values among them."""
    direct_ids: list[int]
    """The answer, with whole blocks read where they are."""
    direct_kv: Tensor
    """Decoded's blocks of that, behind the prompt's whole ones."""


class _Mapping:
    """What turns ask of a mapped pool."""

    is_on_same_device = True

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv

    def is_valid(self, copy: BlockCopy) -> bool:
        return True

    def is_written(self, event: int | None) -> bool:
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Session:
    peer_pool: _Mapping
    is_lost: bool = False


class BothEngines:
    """Prefilld's engine and decoded's over pools of one size, filled with NaN.

    Args:
        model: What to load.
        dtype: Of weights and pools.
        device: Index of the GPU, or None for the CPU.
        num_elements: The pools have more than so many, by room for a request.
        num_prompt_tokens: Of that request.
    """

    @torch.inference_mode()
    def __init__(
        self,
        *,
        model: str,
        dtype: DTypeName,
        device: int | None,
        num_elements: int,
        num_prompt_tokens: int,
    ) -> None:
        config = Config(
            model=ModelConfig(path=model, dtype=dtype),
            prefilld=PrefilldConfig(socket="/unused"),
            decoded=DecodedConfig(socket="/unused", max_batch=1),
        )
        where = Device(name="cpu" if device is None else f"cuda:{device}", index=device)
        host = load_model_host(config, num_blocks=SMALLEST_POOL, device=where)
        block_elements = host.layout.block_bytes // host.layout.item_bytes
        self.num_below = -(-num_elements // block_elements)
        """Blocks that have an element among the first `num_elements`."""
        self.num_blocks = host.layout.num_blocks_for(num_prompt_tokens + NUM_TOKENS)
        """Of the request, with its answer."""
        layout = host.layout.with_num_blocks(self.num_below + self.num_blocks)
        host = dataclasses.replace(host, layout=layout)
        self._num_whole, self._num_partial = divmod(num_prompt_tokens, layout.block_size)
        self._prompt = [
            2 + (7919 * index + 13) % (host.spec.vocab_size - 2)
            for index in range(num_prompt_tokens)
        ]
        self._prefill = make_prefill_engine(
            host, where, token_budget=TOKEN_BUDGET, attention="auto"
        )
        self._decode = make_decode_engine(host, where, config)
        self._mapping = _Mapping(self._prefill.pool.kv)
        for pool in (self._prefill.pool, self._decode.pool):
            pool.kv.fill_(float("nan"))
        self._settle()
        self._sources, self._targets = (BlockAllocator(layout.num_blocks) for _ in range(2))

    @torch.inference_mode()
    def serve(self) -> Served:
        """Compute, hand over and answer the request in the blocks that are free first."""
        sources = self._sources.allocate(self.num_blocks)
        targets = self._targets.allocate(self.num_blocks)
        try:
            num_read = self._num_whole + (self._num_partial > 0)
            first_id = self._compute(sources)
            prompt_kv = _bits(self._prefill.pool.kv, sources[:num_read])
            self._pull(sources[:num_read], targets[:num_read])
            ids = self._answer("pull", first_id, targets)
            kv = _bits(self._decode.pool.kv, targets)

            in_place = [~block for block in sources[: self._num_whole]]
            own = targets[self._num_whole :]
            self._decode.pool.kv[targets] = float("nan")
            self._settle()
            self._pull(sources[self._num_whole : num_read], own[: num_read - self._num_whole])
            self._decode.turns.set_peer(self._mapping.kv)
            direct_ids = self._answer("direct", first_id, [*in_place, *own])
            self._decode.turns.set_peer(None)
            return Served(
                sources=sources,
                targets=targets,
                ids=ids,
                prompt_kv=prompt_kv,
                kv=kv,
                direct_ids=direct_ids,
                direct_kv=_bits(self._decode.pool.kv, own),
            )
        finally:
            self._sources.free(sources)
            self._targets.free(targets)

    def occupy_bottom(self) -> None:
        """Take every block below the border, so that the next request lies above it."""
        for allocator in (self._sources, self._targets):
            allocator.allocate(self.num_below - 1)  # block 0 is reserved

    def _settle(self) -> None:
        """Wait for what was enqueued here: the engines' streams do not."""
        if self._mapping.kv.is_cuda:
            torch.cuda.synchronize(self._mapping.kv.device)

    # --- steps ---------------------------------------------------------------------------------

    def _compute(self, blocks: list[int]) -> int:
        """Prefill the prompt in chunks, and return the first token."""
        prefiller = self._prefill.prefiller
        token_id: int | None = None
        for start in range(0, len(self._prompt), TOKEN_BUDGET):
            chunk = self._prompt[start : start + TOKEN_BUDGET]
            is_last = start + len(chunk) == len(self._prompt)
            prefiller.launch(
                [
                    SequenceStep(
                        token_ids=chunk,
                        start_position=start,
                        block_table=blocks,
                        sampling=GREEDY if is_last else None,
                    )
                ]
            )
            (token_id,) = prefiller.collect()
        assert token_id is not None, "the last chunk samples"
        return token_id

    def _pull(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        copy = BlockCopy(lease_id=1, slot=0, generation=1, sources=sources, targets=targets)
        session = cast("LinkSession", _Session(self._mapping))
        self._decode.turns.submit(CopyJob(session=session, copy=copy))
        while not self._decode.turns.take([]).copies:
            pass

    def _answer(self, key: str, first_id: int, table: list[int]) -> list[int]:
        """Decode greedily, and return the whole answer."""
        ids = [first_id]
        while len(ids) < NUM_TOKENS:
            step = DecodeStep(
                key=key,
                token_id=ids[-1],
                position=len(self._prompt) + len(ids) - 1,
                block_table=table,
                sampling=GREEDY,
            )
            done = self._decode.turns.take([step]).step
            while done is None:
                done = self._decode.turns.take([]).step
            ids += done.token_ids
        return ids


def _bits(kv: Tensor, blocks: list[int]) -> Tensor:
    """Return a copy of blocks as [num_blocks, num_bytes] uint8, so that NaNs compare as well."""
    return kv[blocks].view(len(blocks), -1).view(torch.uint8)


def check_both_ends(engines: BothEngines) -> tuple[Served, Served]:
    """Serve at the bottom and at the top, and fail unless every bit is the same.

    Returns:
        What was served at the bottom, and what at the top.
    """
    bottom = engines.serve()
    engines.occupy_bottom()
    top = engines.serve()
    for served, is_above in ((bottom, False), (top, True)):
        for blocks in (served.sources, served.targets):
            assert all((block >= engines.num_below) is is_above for block in blocks), blocks
    assert bottom.ids == top.ids
    assert bottom.direct_ids == top.direct_ids == bottom.ids
    for name in ("prompt_kv", "kv", "direct_kv"):
        assert torch.equal(getattr(bottom, name), getattr(top, name)), name
    return bottom, top
