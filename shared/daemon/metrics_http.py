"""METRICS over HTTP, for scrapers that know nothing else: one GET, one answer, bounded throughout.

On the daemon's own loop, so what is read is read by the thread that counts.  A request has a
deadline and a size, connections are few, and each carries one request.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from shared.config.addresses import LoopbackAddress, parse_http_address
from shared.daemon.listening import open_listener
from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from structlog.typing import FilteringBoundLogger

    from shared.config.resolution import ResolvedConfig
    from shared.metrics import Metrics

PATH = "/metrics"

MAX_HEAD_BYTES = 8192
"""Of a request: a scraper's is a few hundred."""

MAX_CONNECTIONS = 16
"""At once.  A scraper needs one; what is more waits in the kernel's queue or is turned away."""

DEADLINE_S = 5.0
"""For a whole exchange; Prometheus itself gives up after 10 s."""

CONTENT_TYPE_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent back."""

    status: HTTPStatus
    body: bytes
    content_type: str = CONTENT_TYPE_TEXT
    has_body: bool = True
    """False for HEAD, which tells the length only."""

    def encode(self) -> bytes:
        """Return the bytes of the answer; the connection ends behind it."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            + ("Allow: GET, HEAD\r\n" if self.status is HTTPStatus.METHOD_NOT_ALLOWED else "")
            + "Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + (self.body if self.has_body else b"")


def answer_to(head: bytes, encode: Callable[[str], tuple[bytes, str]]) -> Answer:
    """Answer a request by its head.  Pure but for `encode`.

    Args:
        head: Request line and headers, as they came.
        encode: Returns the metrics, and their type, for an Accept header.
    """
    request_line, *header_lines = head.decode("latin-1").split("\r\n")
    method, _, rest = request_line.partition(" ")
    target, _, version = rest.partition(" ")
    if not version.startswith("HTTP/1."):
        return Answer(status=HTTPStatus.BAD_REQUEST, body=b"this is HTTP/1.1\n")
    if method not in ("GET", "HEAD"):
        return Answer(status=HTTPStatus.METHOD_NOT_ALLOWED, body=b"GET only\n")
    if target.partition("?")[0] != PATH:
        return Answer(
            status=HTTPStatus.NOT_FOUND,
            body=f"metrics are at {PATH}\n".encode(),
            has_body=method == "GET",
        )
    accept = ""
    for line in header_lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "accept":
            accept = value.strip()
    body, content_type = encode(accept)
    return Answer(
        status=HTTPStatus.OK, body=body, content_type=content_type, has_body=method == "GET"
    )


@asynccontextmanager
async def metrics_over_http(
    metrics: Metrics, *, name: str, resolved: ResolvedConfig, log: FilteringBoundLogger
) -> AsyncIterator[None]:
    """Answer scrapers while the block runs, where the daemon's section says an address.

    Args:
        metrics: What is told.
        name: The daemon's; also its section of the configuration.
        resolved: The configuration.
        log: Where it is said at which address it listens.

    Raises:
        ConfigError: Nothing can listen there.
        EnvironmentUnsupportedError: Another daemon has the Unix socket.
    """
    section = getattr(resolved.config, name)
    server = MetricsServer(metrics.encoded, log=log)
    try:
        if section.metrics is not None:
            origin = resolved.origins[f"{name}.metrics"]
            await server.start(section.metrics, group=section.group, origin=origin)
        yield
    finally:
        server.close()


class MetricsServer:
    """Answers scrapers until it is closed.

    Args:
        encode: Returns the metrics, and their type, for an Accept header.
        log: Where it says at which address it listens.
    """

    def __init__(
        self, encode: Callable[[str], tuple[bytes, str]], *, log: FilteringBoundLogger
    ) -> None:
        self._encode, self._log = encode, log
        self._num_open = 0
        self._server: asyncio.Server | None = None
        self._close_socket: Callable[[], None] | None = None
        self.address = ""
        """Where it listens, its port resolved; empty before `start`."""

    async def start(self, configured: str, *, group: str | None, origin: str) -> None:
        """Listen.

        Args:
            configured: A loopback address or a path; see `shared.config.addresses`.
            group: Who else may open a Unix socket.
            origin: Where the address was configured, for messages.

        Raises:
            ConfigError: Nothing can listen there.
            EnvironmentUnsupportedError: Another daemon has the Unix socket.
        """
        address = parse_http_address(configured, origin=origin)
        if isinstance(address, LoopbackAddress):
            sock = _bind(address, origin=origin)
            host, port = sock.getsockname()[:2]
            self.address = f"http://{LoopbackAddress(host, port)}{PATH}"
            self._close_socket = sock.close
            self._server = await asyncio.start_server(
                self._serve, sock=sock, limit=MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
            )
        else:
            listener = open_listener(address, environ={}, group=group)
            self.address = str(address)
            self._close_socket = listener.close
            self._server = await asyncio.start_unix_server(
                self._serve, sock=listener.socket, limit=MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
            )
        self._log.info("metrics.listening", address=self.address)

    def close(self) -> None:
        """Listen no more; connections that are open end by themselves.  Safe to repeat."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._close_socket is not None:
            self._close_socket()
            self._close_socket = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            async with asyncio.timeout(DEADLINE_S):
                writer.write((await self._answer(reader)).encode())
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            writer.transport.abort()  # it went away, or is too slow to be waited for
        finally:
            self._num_open -= 1

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        if self._num_open > MAX_CONNECTIONS:
            return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, body=b"too many connections\n")
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return Answer(
                status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, body=b"the head is too long\n"
            )
        return answer_to(head, self._encode)


def _bind(address: LoopbackAddress, *, origin: str) -> socket.socket:
    """Return a listening TCP socket.

    Raises:
        ConfigError: The port is taken, or may not be had.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot tell metrics at {address}: {error.strerror}") from error
    try:
        # A port in TIME_WAIT from before a restart is ours to take again.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(MAX_CONNECTIONS)
        sock.setblocking(False)
    except OSError as error:
        with suppress(OSError):
            sock.close()
        raise ConfigError(
            f"cannot tell metrics at {address} ({origin}): {error.strerror}",
            hint="free the port, or configure another",
        ) from error
    return sock
