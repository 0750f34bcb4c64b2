"""The pauses between two links, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from prefilld import reconnection
from prefilld.reconnection import FIRST_PAUSE_S, MAX_PAUSE_S, keep_connected
from shared.kv.cuda_status import cuda_error
from tests.unit.shared.daemon.kit import run


class OverError(Exception):
    """The script has no further session."""


class Script:
    """Sessions that go as told, and the pauses behind them; the last one ends the loop."""

    def __init__(self, *faults: str | Exception | None) -> None:
        self._faults = list(faults)
        self.pauses: list[float] = []
        self.num_told = 0

    async def session(self) -> None:
        if not self._faults:
            raise OverError("enough")
        fault = self._faults.pop(0)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            raise ConnectionError(fault)

    def on_pause(self) -> None:
        self.num_told += 1

    def play(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Run to the end; return what was said."""

        async def sleep(pause_s: float) -> None:
            self.pauses.append(pause_s)

        async def scene() -> Any:  # noqa: ANN401 - it never returns
            log = structlog.get_logger()
            await keep_connected(self.session, on_pause=self.on_pause, log=log)

        monkeypatch.setattr(reconnection.asyncio, "sleep", sleep)
        with capture_logs() as logs, pytest.raises(OverError, match="enough"):
            run(scene())
        return [line["reason"] for line in logs]


def test_a_fault_is_told_when_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded that is away for an hour must not fill the log, nor hide what came after it."""
    script = Script("no socket", "no socket", "refused", None, "refused", "")
    assert script.play(monkeypatch) == [
        "no socket",
        "refused",
        "refused",
        "the hand-shake took too long",
    ]


def test_pauses_grow_and_begin_anew_behind_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who restarts decoded waits for a moment only; who left it stopped costs next to nothing."""
    script = Script(*["away"] * 8, None, "away")
    script.play(monkeypatch)
    assert script.pauses[:2] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    assert script.pauses[7:] == [MAX_PAUSE_S, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    assert script.num_told == len(script.pauses)


def test_a_gpu_that_is_full_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the proof may find no memory; prompts wait, and others let go of theirs."""
    script = Script(cuda_error("writing the proof", 2), None)
    (reason,) = script.play(monkeypatch)
    assert reason == "writing the proof failed with CUDA error 2: the GPU's memory is full"
