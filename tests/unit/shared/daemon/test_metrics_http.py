"""`shared.daemon.metrics_http`: a scraper's way in, over loopback or a Unix socket."""

from __future__ import annotations

import asyncio
import http.client
import socket
import stat
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from shared.daemon import metrics_http
from shared.daemon.metrics_http import MetricsServer, answer_to, metrics_over_http
from shared.errors import ConfigError
from tests.support.exposition import Exposition
from tests.unit.shared.daemon.kit import run, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import MakeService
    from tests.unit.shared.daemon.kit import RecordingService


@pytest.fixture
def daemon_name() -> str:
    return "prefilld"


def get(sock: socket.socket, target: str = "/metrics") -> tuple[int, str, str]:
    """Ask as any HTTP client would; return status, type and body."""
    connection = http.client.HTTPConnection("kvpair", timeout=10)
    connection.sock = sock
    connection.request("GET", target)
    response = connection.getresponse()
    result = response.status, response.headers["Content-Type"], response.read().decode()
    connection.close()
    return result


def test_metrics_are_told_over_loopback(make_service: MakeService) -> None:
    """What a scraper gets parses, and says whose it is."""
    service = make_service(prefilld__metrics="127.0.0.1:0")

    async def scene() -> None:
        server = MetricsServer(service.metrics.encoded, log=service.log)
        await server.start("127.0.0.1:0", group=None, origin="default")
        port = int(server.address.rpartition(":")[2].removesuffix("/metrics"))
        sock = socket.create_connection(("127.0.0.1", port))
        status, content_type, body = await asyncio.to_thread(get, sock)
        assert (status, content_type.partition(";")[0]) == (200, "text/plain")
        assert Exposition(body)['kvpair_state{state="loading"}'] == 1
        server.close()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    run(scene())


def test_metrics_are_told_at_a_unix_socket(make_service: MakeService, tmp_path: Path) -> None:
    """It has the daemon socket's manners: 0660, alone at its path, gone in the end."""
    path = tmp_path / "m.sock"
    service = make_service(prefilld__metrics=path)

    async def scene() -> None:
        async with metrics_over_http(
            service.metrics, name="prefilld", resolved=service.resolved, log=service.log
        ):
            assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(path))
            status, _, body = await asyncio.to_thread(get, sock)
            assert status == 200
            assert "kvpair_build_info" in body
        assert not path.exists()

    run(scene())


def test_nothing_listens_unless_it_is_configured(service: RecordingService) -> None:
    async def scene() -> None:
        before = len(asyncio.all_tasks())
        async with metrics_over_http(
            service.metrics, name="prefilld", resolved=service.resolved, log=service.log
        ):
            assert len(asyncio.all_tasks()) == before

    run(scene())


def test_a_port_that_is_taken_is_the_users_to_mend(service: RecordingService) -> None:
    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            server = MetricsServer(service.metrics.encoded, log=service.log)
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .file x.: Address already"):
                await server.start(f"127.0.0.1:{port}", group=None, origin="file x")

    run(scene())


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x", 200),
        (b"GET /metrics?a=b HTTP/1.0", 200),
        (b"HEAD /metrics HTTP/1.1", 200),
        (b"GET / HTTP/1.1", 404),
        (b"POST /metrics HTTP/1.1", 405),
        (b"GET /metrics", 400),
        (b"\x16\x03\x01 \xff", 400),
        (b"", 400),
    ],
)
def test_a_request_is_answered_by_its_head(head: bytes, status: int) -> None:
    answer = answer_to(head, lambda _: (b"x 1\n", "text/plain"))
    assert answer.status == status
    assert answer.encode().endswith(b"x 1\n") == (status == 200 and not head.startswith(b"HEAD"))


def test_the_accept_header_chooses_the_format() -> None:
    head = b"GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text\r\nX: y"
    answer = answer_to(head, lambda accept: (b"", f"for {accept}"))
    assert answer.content_type == "for application/openmetrics-text"


def test_a_peer_that_says_nothing_or_too_much_is_let_go(
    service: RecordingService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every wait has a deadline, every buffer a bound, and the next scraper is served."""
    monkeypatch.setattr(metrics_http, "DEADLINE_S", 0.05)

    async def scene() -> None:
        server = MetricsServer(service.metrics.encoded, log=service.log)
        path = tmp_path / "m.sock"
        await server.start(str(path), group=None, origin="default")
        reader, writer = await asyncio.open_unix_connection(str(path))
        assert await reader.read() == b"", "silence is hung up on"
        writer.close()
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n")
        assert (await reader.read(12)) == b"HTTP/1.1 431"
        writer.close()
        await until(lambda: server._num_open == 0)
        server.close()

    run(scene())


def test_connections_are_few(
    service: RecordingService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "MAX_CONNECTIONS", 2)

    async def scene() -> None:
        server = MetricsServer(service.metrics.encoded, log=service.log)
        path = str(tmp_path / "m.sock")
        await server.start(path, group=None, origin="default")
        async with AsyncExitStack() as stack:
            for _ in range(2):
                _, writer = await asyncio.open_unix_connection(path)
                stack.callback(writer.close)
            await until(lambda: server._num_open == 2)
            reader, writer = await asyncio.open_unix_connection(path)
            stack.callback(writer.close)
            assert (await reader.read(12)) == b"HTTP/1.1 503"
        await until(lambda: server._num_open == 0)
        server.close()

    run(scene())
