"""The service as operators watch it: its journal, its metrics, and the doctor, by who may ask."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.exposition import Exposition

if TYPE_CHECKING:
    from tests.support.machine import Machine

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(300)]


def test_one_requests_life_is_read_from_the_journal(serving: Machine) -> None:
    """Both units' lines, in their order, and none of another request's."""
    request_id = json.loads(
        serving.run("kvpair", "generate", "--max-tokens", "8", "--json", "hello", user="member")
    )["id"]
    output = serving.run("kvpair", "logs", "--json", "--request", request_id)
    lines = [json.loads(line) for line in output.splitlines()]
    assert {line["request_id"] for line in lines} == {request_id}
    events = [(line["daemon"], line["event"]) for line in lines]
    assert events[0] == ("prefilld", "request.accepted")
    assert events[-1] == ("decoded", "request.ended")
    shown = serving.run("kvpair", "logs", "--request", request_id)
    assert len(shown.splitlines()) == len(lines)
    assert "+0.000 ms  prefilld  request.accepted" in shown


def test_the_manager_is_heard_as_well(serving: Machine) -> None:
    """What systemd says of the units stands between their own lines."""
    output = serving.run("kvpair", "logs", "--since", "1h")
    assert "systemd   " in output
    assert "daemon.started" in output


def test_a_member_of_the_group_may_watch(serving: Machine) -> None:
    scrape = Exposition(serving.run("kvpair", "metrics", user="member"))
    assert scrape.by_label("kvpair_link_up", "daemon") == {"prefilld": 1, "decoded": 1}
    assert "prefilld serving" in serving.run("kvpair", "top", "--interval", "0.1", user="member")


def test_the_doctor_finds_the_service_well(serving: Machine) -> None:
    told = json.loads(serving.run("kvpair", "doctor", "--json", user="member"))
    assert [each for each in told["findings"] if each["verdict"] == "fail"] == []
    by_check = {finding["check"]: finding["text"] for finding in told["findings"]}
    assert by_check["prefilld folder"].endswith("open to members of kvpair as well")
    assert by_check["decoded"].startswith("is serving")


def test_the_doctor_tells_a_stranger_how_to_come_in(serving: Machine) -> None:
    done = serving.ask("kvpair", "doctor", "--json", user="stranger")
    assert done.returncode == 78
    by_check = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert by_check["prefilld"]["verdict"] == "fail"
    assert by_check["prefilld"]["cure"].startswith("sudo usermod -aG kvpair stranger")
