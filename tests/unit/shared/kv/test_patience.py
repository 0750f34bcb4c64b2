"""Waiting for memory: how long, and for what."""

from __future__ import annotations

from collections.abc import Callable

from shared.kv.patience import QUIET_S, RETRY_S, SETTLE_S, settled, wait_for


def never(_: float) -> None:
    raise AssertionError("somebody waited")


def readings(*free: int) -> tuple[Callable[[], int], list[float]]:
    """Return what tells these numbers, the last for ever, and the pauses between them."""
    left, pauses = list(free), []

    def look() -> int:
        return left.pop(0) if len(left) > 1 else left[0]

    return look, pauses


def test_what_is_there_is_not_waited_for() -> None:
    assert wait_for(lambda: 7, sleep=never) == 7


def test_an_attempt_is_repeated_until_it_comes_to_something() -> None:
    """Zero is something: an address may be any number."""
    results, pauses = [None, None, 0], list[float]()
    assert wait_for(lambda: results.pop(0), sleep=pauses.append) == 0
    assert pauses == [RETRY_S] * 2


def test_patience_ends() -> None:
    pauses: list[float] = []
    assert wait_for(lambda: None, patience_s=5 * RETRY_S, sleep=pauses.append) is None
    assert len(pauses) == 5


def test_memory_that_comes_back_is_waited_for_to_the_end() -> None:
    """A pool that measured in between would stay at a part of the GPU for its whole life."""
    look, pauses = readings(10, 10, 40, 40, 40, 90)
    assert settled(look, sleep=pauses.append) == 90
    assert len(pauses) == 5 + round(QUIET_S / RETRY_S)


def test_memory_that_others_take_meanwhile_is_gone() -> None:
    """Both daemons measure one GPU, and the other may be first."""
    look, pauses = readings(90, 45)
    assert settled(look, sleep=pauses.append) == 45
    assert len(pauses) == round(QUIET_S / RETRY_S)


def test_memory_that_never_settles_is_taken_as_it_is() -> None:
    """Somebody else's program may free a little for ever."""
    count = iter(range(10_000))
    pauses: list[float] = []
    assert settled(lambda: next(count), sleep=pauses.append) == len(pauses)
    assert sum(pauses) <= SETTLE_S
