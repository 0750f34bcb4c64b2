"""Turns a conversation into the text that the model was trained to continue.

The template is a program that came with the model's file, and the conversation comes from
anybody, so it runs in a process of its own (`template_worker`) under limits that the kernel
enforces.  The process is started once and reused: a render then costs 0.1 ms.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from socket import socket, socketpair

from shared.model.errors import ChatTemplateError
from shared.model.template_worker import receive_map, send_map

START_TIMEOUT_S = 20.0
"""For a fresh Python to import Jinja: 0.2 s, a hundred times that on a machine in distress."""

GRACE_S = 1.0
"""How much later than the worker's own timer we take it for hung (a stopped process, say)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one render may use."""

    max_render_s: float = 2.0
    """Wall time.  The largest request takes 0.1 s; others wait for their turn meanwhile."""
    max_memory_bytes: int = 512 << 20
    """Address space of the worker: Python and Jinja take 50 MiB, and a template that handles the
    largest request, at four bytes a character, several times over 150 MiB more."""
    max_characters: int = 16 << 20
    """Output: four times the largest request, and far beyond any model's context."""


class ChatTemplate:
    """The chat template of one model.  Any thread may use it; renders take turns.

    Args:
        source: Jinja source.
        variables: What the template can refer to beside the conversation: `bos_token` and so on.
        limits: What one render may use.
    """

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def start(self) -> None:
        """Start the worker now, so that the first request need not wait and a bad template shows.

        Raises:
            ChatTemplateError: The template is no Jinja, or breaks its limits in being compiled.
        """
        with self._lock:
            self._running()

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt for a conversation.  Blocks: not for an event loop's thread.

        Args:
            messages: Turns, each with `role` and `content`.
            add_generation_prompt: End with the beginning of the assistant's next turn.

        Raises:
            ChatTemplateError: The template refuses the conversation or breaks its limits.  The
                next render starts afresh.
        """
        request = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            return self._ask(self._running(), request, self._limits.max_render_s + GRACE_S)

    def close(self) -> None:
        """Stop the worker; a later render starts another."""
        with self._lock:
            self._stop()

    def _running(self) -> _Worker:
        if self._worker is None:
            self._worker = _Worker()
            setup = {"source": self.source, "variables": self._variables, **asdict(self._limits)}
            try:
                self._ask(self._worker, setup, START_TIMEOUT_S)
            except ChatTemplateError:
                self._stop()  # it has no template to render
                raise
        return self._worker

    def _ask(self, worker: _Worker, request: dict[str, object], timeout_s: float) -> str:
        try:
            reply = worker.ask(request, timeout_s)
        except OSError:  # includes a time-out
            reply = None
        except BaseException:
            self._stop()  # its answer would be taken for the next one's
            raise
        if reply is None:
            self._stop()
            raise ChatTemplateError(
                "the model's chat template was stopped: it took more than "
                f"{self._limits.max_render_s:g} s or crashed"
            )
        if "error" in reply:
            raise ChatTemplateError(f"the model's chat template fails: {reply['error']}")
        return reply["text"]

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()


class _Worker:
    """One worker process; stopped when this object goes, at the latest."""

    def __init__(self) -> None:
        self._connection, theirs = socketpair()
        with theirs:
            # -P: what lies in the daemon's working directory is no module of ours.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shared.model.template_worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        self.stop = weakref.finalize(self, _end, process, self._connection)

    def ask(self, request: dict[str, object], timeout_s: float) -> dict[str, str] | None:
        self._connection.settimeout(timeout_s)
        send_map(self._connection, request)
        return receive_map(self._connection)


def _end(process: subprocess.Popen[bytes], connection: socket) -> None:
    connection.close()
    process.kill()
    process.wait()
