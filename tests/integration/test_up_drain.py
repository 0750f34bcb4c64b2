"""Stopping `kvpair up`: what was accepted is answered, and nobody waits for anybody in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from protocol.client import Client
from protocol.errors import UnixSocketError
from protocol.messages import Accepted
from tests.support.pair import START_TIMEOUT_S, wait_until, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

KVPAIR = Path(sys.executable).with_name("kvpair")
DRAIN_TIMEOUT_S = 20


@pytest.fixture
def up(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """A pair under `up` that computes four prompt tokens a step, so that prompts take a while."""
    settings = {
        "model.path": write_tiny_model(tmp_path),
        "prefilld.token_budget": 4,
        "pool.num_blocks": 256,
        "decoded.num_blocks": 256,
        "limits.drain_timeout_s": DRAIN_TIMEOUT_S,
        "log.prompts": "true",
    }
    flags = [f"--set={key}={value}" for key, value in settings.items()]
    socket = tmp_path / "prefilld.sock"
    process = subprocess.Popen(
        [KVPAIR, "up", *flags],
        env=os.environ | {"KVPAIR_SOCKET": str(socket)},
        stderr=subprocess.PIPE,
        text=True,
    )
    client = Client(socket, timeout_s=60)

    def serves() -> bool:
        assert process.poll() is None
        try:
            return client.status()["state"] == "serving"
        except UnixSocketError:
            return False

    try:
        wait_until(serves, timeout_s=START_TIMEOUT_S, what="the pair serves")
        yield process, client
    finally:
        process.kill()
        process.communicate()


def test_a_prompt_in_prefill_is_still_handed_over_and_answered(
    up: tuple[subprocess.Popen[str], Client],
) -> None:
    """One daemon must not leave the other while that has something to hand over."""
    process, client = up
    prompt = [2 + index % 250 for index in range(1_500)]
    with client.stream(prompt, max_tokens=5, ignore_eos=True, id="late") as stream:
        assert isinstance(next(stream), Accepted)
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
        reader.start()
        events = list(stream)
    assert events[-1].reason == "length"
    assert process.wait(timeout=30) == 0
    assert time.monotonic() - began_s < DRAIN_TIMEOUT_S
    reader.join(timeout=10)
    log = "".join(lines)
    assert "drain.expired" not in log
    assert "app.hung" not in log
    assert '"event":"request.prompt"' in log, "log.prompts is on"
    assert '"event":"request.answer"' in log
