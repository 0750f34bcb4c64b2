"""Two processes on one GPU, on two, and on two of which each sees only its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from shared.kv.layout import KVLayout
from tests.gpu.ipc.processes import Process

NUM_SPARE = 7
"""Workers that are started in advance, one for each that a test kills or breaks."""


@dataclass(frozen=True)
class Place:
    """Which GPUs the daemons use."""

    name: str
    indices: tuple[int, int] = (0, 0)
    visible: tuple[str, str] | None = None


ONE_GPU = Place("one GPU")
ALL_VISIBLE = [ONE_GPU]
PLACES = [ONE_GPU]
if torch.cuda.device_count() > 1:
    ALL_VISIBLE += [Place("two GPUs", (0, 1))]
    PLACES += [*ALL_VISIBLE[1:], Place("each its own", (0, 0), ("0", "1"))]

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

Start = Callable[[Place, int], Process]


@dataclass(eq=False)
class Pair:
    """prefilld and decoded."""

    place: Place
    maker: Process
    reader: Process
    uuids: tuple[str, str]


@pytest.fixture(scope="session")
def expandable() -> Iterator[dict[str, Process]]:
    """By variable: a process whose torch allocates what cannot be exported."""
    made = {
        name: Process(environ={name: "expandable_segments:True"}) for name in ALLOCATOR_VARIABLES
    }
    yield made
    for process in made.values():
        process.kill()


@pytest.fixture(scope="session")
def spares(expandable: dict[str, Process]) -> Iterator[list[Process]]:
    """Processes that import at the same time, while others work."""
    assert expandable, "they are started first"
    made = [Process() for _ in range(NUM_SPARE + 2 * len(PLACES))]
    spares = list(made)
    yield spares
    for process in made:
        process.kill()


@pytest.fixture(scope="session")
def start(spares: list[Process]) -> Start:
    """Give a process that has begun on one side of a place."""

    def start(place: Place, side: int) -> Process:
        process = spares.pop(0)
        if place.visible is not None:
            process.do("hide_gpus", place.visible[side])
        process.do("begin", place.indices[side])
        return process

    return start


@pytest.fixture(scope="session")
def pairs(start: Start) -> dict[str, Pair]:
    return {}


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param


@pytest.fixture
def pair(place: Place, pairs: dict[str, Pair], spares: list[Process]) -> Pair:
    """Two processes that last for the session, without a pool or a mapping between tests."""
    if place.name not in pairs:
        maker, reader = spares.pop(0), spares.pop(0)
        for side, process in enumerate((maker, reader)):
            if place.visible is not None:
                process.do("hide_gpus", place.visible[side])
            process.tell("begin", place.indices[side])
        pairs[place.name] = Pair(place, maker, reader, (maker.answer(), reader.answer()))
    return pairs[place.name]


@pytest.fixture
def layout() -> KVLayout:
    """Blocks of 64 KiB, as many as fill 64 MiB."""
    return KVLayout(
        num_blocks=1024, num_layers=4, num_kv_heads=4, block_size=16, head_dim=64, dtype="bfloat16"
    )
