"""One booted machine for all tests of the service, with a member of the group and a stranger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.machine import Machine
from tests.support.pair import write_tiny_model

MODEL = "/var/cache/kvpair/tiny.gguf"
CONTEXT_TOKENS = 4096
CONFIGURATION = f"""
[model]
path = "{MODEL}"

[prefilld]
threads = 1

[decoded]
threads = 1
num_blocks = 4096

[log]
level = "debug"
"""


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """The machine, with kvpair installed and nothing of it running but its socket."""
    with TemporaryDirectory(prefix="kvpair-") as folder, Machine.boot(Path(folder)) as machine:
        for user in ("member", "stranger"):
            machine.run("useradd", "--create-home", user)
        machine.run("usermod", "-aG", "kvpair", "member")
        write_tiny_model(machine.root / "var/cache/kvpair", context_tokens=CONTEXT_TOKENS)
        machine.write("/etc/kvpair/kvpair.toml", CONFIGURATION)
        yield machine


@pytest.fixture
def serving(machine: Machine) -> Machine:
    """The machine, serving, its counts of failures forgotten."""
    machine.systemctl("reset-failed")
    machine.systemctl("start", "prefilld", "decoded")
    return machine
