"""`kvpair up` with stand-ins for the daemons: modules of their names, found before the real ones.

The stand-ins run in the real service frame and answer STATUS on their real sockets; what they
lack is a model.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.shared.cli.conftest import Kvpair

STAND_IN = r"""
import asyncio, os, socket, sys
from protocol.connection import Connection
from protocol.errors import AddressInUseError
from protocol.messages import Status
from protocol.states import Role
from shared.service import run_daemon
from shared.service.frame import DaemonState

async def app(service):
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(service.socket_path))
    except OSError as error:
        raise AddressInUseError(path=str(service.socket_path), pid=None) from error
    listener.listen()
    listener.setblocking(False)
    service.set_state(DaemonState.SERVING)
    os.write(1, b"a daemon's stdout\n")
    serving = asyncio.ensure_future(serve(service, listener))
    await service.draining.wait()
    serving.cancel()
    service.socket_path.unlink()

async def serve(service, listener):
    loop = asyncio.get_running_loop()
    while True:
        client, _ = await loop.sock_accept(listener)
        with client:
            client.setblocking(False)
            connection = Connection(Role.DECODED_CLIENT)
            while connection.next_event() is None:
                connection.receive_data(await loop.sock_recv(client, 4096))
            frame = connection.send(Status(status={**service.status(), "argv": sys.argv[1:]}))
            await loop.sock_sendall(client, frame)

run_daemon(NAME, app)
"""


@pytest.fixture
def up(kvpair: Kvpair, tmp_path: Path) -> Kvpair:
    """Run `kvpair` where the daemons' modules are the stand-ins."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("prefilld", "decoded"):
        (modules / f"{name}.py").write_text(STAND_IN.replace("NAME", repr(name)))
    paths = [str(modules), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    kvpair.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return kvpair


def test_a_command_finds_the_pair_and_has_stdout_for_itself(up: Kvpair, socket_path: Path) -> None:
    """Answers go to stdout; whatever the daemons print must not mix with them."""
    code, output, errors = up(
        "up", "--set", "log.format=json", "--model=m", "--", "sh", "-c",
        "echo $KVPAIR_SOCKET; command -v python; exit 3",
    )  # fmt: skip
    assert code == 3
    found_socket, found_python = output.splitlines()
    assert found_socket == str(socket_path)
    assert Path(found_python).name == "python"
    logged = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    for name in ("prefilld", "decoded"):
        events = [line["event"] for line in logged if line["daemon"] == name]
        assert (events[0], events[-1]) == ("daemon.started", "daemon.stopped")
    assert errors.count("a daemon's stdout") == 2
    assert not socket_path.exists(), "the daemons drained and tidied up"


def test_the_daemons_get_the_same_flags(up: Kvpair) -> None:
    code, output, _ = up(
        "up", "--set=pool.num_blocks=7", "--model=m", "--log-level=error", "--",
        "python", "-c", "from shared.cli.main import main; main(['status', '--json'])",
    )  # fmt: skip
    assert code == 0
    told = json.loads(output)
    expected = ["--set=pool.num_blocks=7", "--model=m", "--log-level=error"]
    assert told["prefilld"]["argv"] == told["decoded"]["argv"] == expected


def test_a_second_pair_on_the_same_sockets_refuses(up: Kvpair) -> None:
    """Its command must not run against the first pair as if that were its own."""
    with up.start("up", "--log-format=json", "--", "sh", "-c", "echo serving; cat") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "serving\n"
        code, output, errors = up("up", "--log-format=json", "--", "echo", "never")
        assert (code, output) == (78, "")
        assert "another process listens on" in errors
        assert "refuses to run" in errors
        first.communicate(timeout=30)
    assert first.returncode == 0


def test_a_wrong_configuration_starts_nothing(up: Kvpair) -> None:
    code, output, errors = up("up", "--set", "pool.num_blocks=1", "--", "echo", "never")
    assert (code, output) == (78, "")
    assert errors.startswith("kvpair: pool.num_blocks = '1'")
    assert errors.count("\n") == 1


def test_without_a_command_the_pair_runs_until_it_is_interrupted(up: Kvpair) -> None:
    with up.start("up", "--log-format=json") as process:
        assert process.stderr is not None
        serving: set[str] = set()
        while len(serving) < 2:
            line = process.stderr.readline()
            if line.startswith("{") and json.loads(line).get("state") == "serving":
                serving.add(json.loads(line)["daemon"])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.count('"event":"daemon.stopped"') == 2


def test_a_commands_own_flags_are_left_to_it(up: Kvpair) -> None:
    code, output, _ = up("up", "--log-level=error", "echo", "--model", "-n", "x")
    assert (code, output) == (0, "--model -n x\n")
