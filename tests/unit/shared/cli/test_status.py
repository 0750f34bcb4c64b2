"""`kvpair status` against daemons that follow a script."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from protocol.messages import Status
from shared.cli.status import flatten
from tests.support.typed_terminal import Terminal

if TYPE_CHECKING:
    from tests.unit.shared.cli.conftest import Kvpair, Peer, Script, Serve

POOL = {
    "total": 10,
    "reserved": 1,
    "free": 4,
    "cached": 0,
    "active": 2,
    "leased": 3,
    "quarantined": 0,
    "block_size": 16,
    "block_bytes": 737_280,
}
PREFILLD: dict[str, Any] = {
    "state": "serving",
    "version": "0.1.0",
    "uptime_s": 3725.0,
    "epoch": "00112233445566778899aabbccddeeff",
    "pid": 12345,
    "device": "cpu",
    "model": "/srv/models/a-rather-long-name/SmolLM2-135M-Instruct.Q4_1.gguf",
    "pool": POOL,
    "queue": {"waiting": 0, "running": 1},
    "link": {"state": "open", "peer_pid": 12346, "access": "pull", "bandwidth_gb_s": 8.1234,
             "rtt_us": 52.5},
    "counters": {"kvpair_requests_total": 4},
}  # fmt: skip
DECODED = {
    "state": "serving",
    "pool": POOL,
    "sequences": {"running": 1, "waiting": 0, "swapped": 0},
}


def telling(status: dict[str, Any]) -> Script:
    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(Status(status=status))

    return script


def test_json_is_what_both_daemons_said(serve: Serve, kvpair: Kvpair) -> None:
    serve(telling(PREFILLD))
    serve(telling(DECODED), name="decoded")
    code, output, errors = kvpair("status", "--json")
    assert (code, errors) == (0, "")
    assert json.loads(output) == {"prefilld": PREFILLD, "decoded": DECODED}


def test_the_table_has_a_row_a_line_and_says_whether_blocks_add_up(
    serve: Serve, kvpair: Kvpair
) -> None:
    """In a pipe, where `grep` reads lines; a terminal folds what it has no columns for."""
    serve(telling(PREFILLD))
    serve(telling(DECODED), name="decoded")
    code, output, _ = kvpair("status")
    assert code == 0
    assert [line for line in output.splitlines() if str(PREFILLD["model"]) in line]
    rows = {line[:20].strip(): line[20:].split() for line in output.splitlines()}
    assert rows["pool leased"] == ["3", "3"]
    assert rows["pool adds up"] == ["yes", "yes"]
    assert rows["pid"] == ["12345", "-"]
    assert rows["sequences running"] == ["-", "1"]
    assert rows["link bandwidth_gb_s"] == ["8.12", "-"]
    assert "counters" not in output


def test_the_table_fits_a_terminal_of_eighty_columns(serve: Serve, kvpair: Kvpair) -> None:
    """Folded, not cut off: a path that is cut off cannot be copied."""
    serve(telling(PREFILLD))
    serve(telling(DECODED), name="decoded")
    program = [sys.executable, "-c", "from shared.cli.main import main; main()", "status"]
    with Terminal(program, kvpair.environ | {"COLUMNS": "80"}) as terminal:
        assert terminal.wait() == 0
        rows = terminal.unread.splitlines()
    assert max(map(len, rows)) <= 80
    assert "…" not in terminal.unread
    assert any(row.strip().startswith("pool adds up") for row in rows)


def test_one_daemon_is_shown_when_the_other_is_away(serve: Serve, kvpair: Kvpair) -> None:
    """Whoever asks because something is wrong needs the half that works."""
    serve(telling(DECODED), name="decoded")
    code, output, errors = kvpair("status", "--json")
    assert code == 69
    assert json.loads(output) == {"prefilld": None, "decoded": DECODED}
    assert errors.startswith("kvpair: prefilld: no socket at")
    assert errors.count("\n") == 1


def test_no_daemon_at_all_leaves_stdout_empty(kvpair: Kvpair) -> None:
    code, output, errors = kvpair("status")
    assert (code, output) == (69, "")
    assert errors.count("kvpair: ") == 2


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("uptime_s", 3725.4, "1 h 2 min 5 s"),
        ("uptime_s", 0.25, "0.25"),
        ("block_bytes", 737_280, "737,280 B"),
        ("pid", 12345, "12345"),
        ("num", 12345, "12,345"),
        ("rate", 123456.7, "123,457"),
        ("is_open", True, "yes"),
        ("is_open", False, "no"),
        ("epoch", None, "-"),
        ("state", "serving", "serving"),
    ],
)
def test_values_are_shown_in_the_unit_that_their_key_names(
    key: str, value: object, shown: str
) -> None:
    assert flatten({key: value}) == {key: shown}


def test_blocks_that_do_not_add_up_are_told_with_the_numbers() -> None:
    rows = flatten({"pool": {**POOL, "leased": 2}})
    assert rows["pool adds up"] == "no: 9 of 10"
    assert "pool adds up" not in flatten({"pool": {"total": 3}})


def test_what_only_decoded_tells_of_a_part_stands_with_that_part(
    serve: Serve, kvpair: Kvpair
) -> None:
    """Why blocks are read in place is looked for beside how they are read."""
    serve(telling({"link": {"access": "pull"}, "queue": {"waiting": 0}}))
    serve(telling({"link": {"access": "pull", "access_because": "so"}}), name="decoded")
    _, output, _ = kvpair("status")
    rows = [line[:20].strip() for line in output.splitlines()]
    assert rows.index("link access_because") == rows.index("link access") + 1
