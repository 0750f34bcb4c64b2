"""The process in which a chat template runs, so that its limits hold whatever it does.

A template may loop for ever inside one expression or ask for a terabyte of spaces; nothing short
of a process can be stopped then.  The kernel enforces both limits: a timer that is armed around
each render kills the process, and its address space is bounded.

It speaks over the socket on its standard input: length-prefixed msgpack maps, one reply a
request.  First comes {source, variables, max_render_s, max_memory_bytes, max_characters}, then
{messages, add_generation_prompt} as often as wanted; replies are {text} or {error}.  It lives
until the other end closes.
"""

from __future__ import annotations

import resource
import signal
import socket
import struct
from typing import Any

from msgspec import msgpack

LENGTH = struct.Struct("!I")  # bytes in the map that follows, big-endian

MAX_ERROR_CHARACTERS = 500
"""Enough for a sentence; a template may put a whole conversation into its error."""


def send_map(connection: socket.socket, body: dict[str, Any]) -> None:
    """Send one map.

    Raises:
        OSError: The connection broke.
    """
    data = msgpack.encode(body)
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive_map(connection: socket.socket) -> dict[str, Any] | None:
    """Receive one map; None when the other end is gone.

    Raises:
        OSError: The connection broke.
    """
    prefix = _receive(connection, LENGTH.size)
    if prefix is None:
        return None
    data = _receive(connection, LENGTH.unpack(prefix)[0])
    if data is None:
        return None
    return msgpack.decode(data, type=dict[str, Any])


def _receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    while num_bytes:
        part = connection.recv(min(num_bytes, 1 << 20))
        if not part:
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def main() -> None:
    """Serve renders until the other end closes."""
    # A terminal's Ctrl-C and a service manager's stop reach the whole group; this process ends
    # with its daemon, which may want it while it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=0)
    setup = receive_map(connection)
    if setup is None:
        return
    from shared.model.template_sandbox import (  # noqa: PLC0415 - the daemon needs only the above
        compile_template,
        render_template,
    )

    max_memory_bytes = setup["max_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    template = None
    request: dict[str, Any] | None = {}
    while request is not None:
        # SIGALRM keeps its default action: the kernel kills, no Python code needs to run.
        signal.setitimer(signal.ITIMER_REAL, setup["max_render_s"])
        try:
            if template is None:
                template = compile_template(setup["source"])
                reply = {"text": ""}
            else:
                variables = setup["variables"] | {
                    "add_generation_prompt": request["add_generation_prompt"],
                    "tools": None,
                    "documents": None,
                }
                text = render_template(
                    template, request["messages"], variables, setup["max_characters"]
                )
                text.encode()  # a template can write surrogates, which no message can carry
                reply = {"text": text}
        except MemoryError:
            reply = {"error": f"it needs more than {max_memory_bytes >> 20} MiB of memory"}
        except Exception as error:  # the border: template code raises anything
            reply = {"error": " ".join(str(error).split())[:MAX_ERROR_CHARACTERS]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        send_map(connection, reply)
        request = receive_map(connection)


if __name__ == "__main__":
    main()
