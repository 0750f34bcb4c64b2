"""The pair as operators watch it: scraped, charted, alerted on, and followed in its logs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from protocol.errors import RequestError
from tests.support.exposition import Exposition
from tests.support.pair import DAEMONS, DaemonName, Pair, write_tiny_model
from tests.support.promql import (
    SCRAPER_LABELS,
    grouping_labels,
    selectors,
    template_labels,
)
from tests.support.raw_peer import ClosedByPeerError, RawPeer

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEMD = Path(__file__).parents[2] / "systemd"
DASHBOARD = SYSTEMD / "grafana" / "kvpair.json"
ALERTS = SYSTEMD / "prometheus" / "kvpair-alerts.yml"
SCRAPE = SYSTEMD / "prometheus" / "scrape.yml"

REQUEST_ID = "watched-1"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair that has answered, refused, and met a peer that speaks nonsense."""
    folder = tmp_path_factory.mktemp("p")
    listeners = {f"{daemon}.metrics": "127.0.0.1:0" for daemon in DAEMONS}
    with Pair(folder, model=write_tiny_model(folder), settings=listeners) as running:
        running.client.generate([5, 6, 7] * 20, max_tokens=20, ignore_eos=True, id=REQUEST_ID)
        running.client.generate([5, 6, 7], max_tokens=1)
        with pytest.raises(RequestError, match="shorten it"):
            running.client.generate([5] * 5000, max_tokens=20)
        for path in (running.socket, running.decoded_socket):
            with RawPeer.connect(path) as peer, suppress(ClosedByPeerError, OSError):
                peer.socket.sendall(b"\x00\x00\x00\x01\xc1")
                peer.socket.recv(1 << 16)
        running.wait_settled()
        yield running


def kvpair(pair: Pair, *arguments: str) -> str:
    """Run the command to its end; return what it printed."""
    program = [sys.executable, "-c", "from shared.cli.main import main; main()"]
    done = subprocess.run(
        [*program, *arguments], env=pair.environ, stdout=subprocess.PIPE, check=True, timeout=60
    )
    return done.stdout.decode()


def over_http(pair: Pair, daemon: DaemonName) -> str:
    """Scrape a daemon as Prometheus does."""
    (address,) = [
        line["address"] for line in pair.log(daemon) if line["event"] == "metrics.listening"
    ]
    with urllib.request.urlopen(address, timeout=10) as response:
        return response.read().decode()


@pytest.fixture(scope="module")
def scrape(pair: Pair) -> Exposition:
    """What both daemons export, as one scrape."""
    return Exposition(kvpair(pair, "metrics"))


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_scrape_over_http_is_what_the_socket_tells(pair: Pair, daemon: DaemonName) -> None:
    """Parsed by prometheus_client's own parser, and every series names its daemon."""
    scraped = Exposition(over_http(pair, daemon))
    client = pair.client if daemon == "prefilld" else pair.decoded_client
    told = Exposition(client.metrics())
    ours = {name for name in scraped if name.startswith("kvpair_")}
    assert ours == {name for name in told if name.startswith("kvpair_")}
    assert all("daemon" in labels for labels in scraped.labels.values())
    assert scraped['kvpair_state{state="serving"}'] == 1
    assert scraped["kvpair_link_up"] == 1


def test_what_happened_was_counted(scrape: Exposition) -> None:
    """Two answers of 20 and 1 tokens, one refusal: each shows where it took effect."""
    assert scrape["kvpair_requests_accepted_total"] == 2
    assert scrape["kvpair_ttft_seconds_count"] == 2
    assert scrape["kvpair_generated_tokens_total"] == 19
    assert scrape["kvpair_itl_seconds_count"] == 18
    assert scrape["kvpair_second_token_seconds_count"] == 1
    assert scrape.by_label("kvpair_handoff_stage_seconds_count", "stage") == {
        "adopt": 1, "copy_wait": 1, "copy": 1, "step_wait": 1
    }  # fmt: skip
    assert scrape.by_label("kvpair_requests_failed_total", "code") == {"too-large": 1}
    assert set(scrape.by_label("kvpair_protocol_errors_total", "daemon")) == set(DAEMONS)
    assert scrape.by_label("kvpair_pool_unaccounted_blocks", "daemon") == dict.fromkeys(DAEMONS, 0)
    assert scrape["kvpair_pulled_bytes_total"] > 0


def expressions() -> list[Any]:
    """Return (where it stands, expression, text that shows labels) of dashboard and alerts."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [
        (f"panel {panel['title']}", target["expr"], target["legendFormat"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    found += [
        ("annotation", annotation["expr"], annotation["titleFormat"])
        for annotation in dashboard["annotations"]["list"]
    ]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            shown = " ".join(rule["annotations"].values())
            found.append((f"alert {rule['alert']}", rule["expr"], shown))
    return [pytest.param(*each, id=each[0]) for each in found]


@pytest.mark.parametrize(("where", "expression", "shown"), expressions())
def test_charts_and_alerts_read_what_the_daemons_export(
    scrape: Exposition, where: str, expression: str, shown: str
) -> None:
    """A metric that was renamed would leave an empty chart, and an alert that never fires."""
    read = selectors(expression)
    assert read or expression.startswith("up{"), where
    families = {family.name for family in scrape.families}
    labels: set[str] = set()
    for selector in read:
        bare = re.sub(r"_(total|bucket|sum|count)$", "", selector.name)
        assert selector.name in scrape.labels or {selector.name, bare} & families, selector.name
        known = scrape.labels.get(selector.name, set())
        labels |= known
        for label, _, _ in selector.matchers:
            assert not known or label in known | SCRAPER_LABELS, (selector.name, label)
            is_fixed = label in {"state", "queue", "stage", "use", "daemon"}
            if is_fixed and known:
                exported = set(scrape.by_label(selector.name, label))
                assert selector.values_of(label) <= exported, (selector.name, label)
    if all(scrape.labels.get(selector.name) for selector in read):
        asked = grouping_labels(expression) | template_labels(shown)
        assert asked <= labels | SCRAPER_LABELS, asked - labels


def test_every_metric_of_the_daemons_is_charted_or_alerted_on(scrape: Exposition) -> None:
    """What is exported and shown nowhere is found by nobody."""
    shown = DASHBOARD.read_text() + ALERTS.read_text()
    ours = {family.name for family in scrape.families if family.name.startswith("kvpair_")}
    known_elsewhere = {
        "kvpair_build_info",  # which version; the dashboard's choice of instance reads it
        "kvpair_pool_block_bytes",  # turns blocks into bytes, by hand
        "kvpair_reserved_slots",  # the ratio is charted
        "kvpair_chunks_announced",
        "kvpair_handoffs_adopted",
        "kvpair_handoffs_rejected",
        "kvpair_links_opened",
    }
    missing = {name for name in ours if name not in shown} - known_elsewhere
    assert not missing


def test_alerts_say_what_to_do_and_how_bad_it_is() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert set(rule["annotations"]) == {"summary", "action"}
    scrape = yaml.safe_load(SCRAPE.read_text())
    assert [job["job_name"] for job in scrape["scrape_configs"]] == ["kvpair"]
    assert scrape["rule_files"] == [ALERTS.name]


def test_the_dashboards_panels_do_not_overlap() -> None:
    """Grafana moves panels that do, and then nothing is where it was meant to be."""
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (column, row)
            for column in range(at["x"], at["x"] + at["w"])
            for row in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_one_requests_life_is_one_timeline_of_both_daemons(pair: Pair) -> None:
    """From ACCEPTED at prefilld to END at decoded, the lease's end included."""
    files = [str(pair.log_path(daemon)) for daemon in DAEMONS]
    output = kvpair(pair, "logs", "--json", "--request", REQUEST_ID, *files)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["monotonic_ns"] for line in lines] == sorted(
        line["monotonic_ns"] for line in lines
    )
    told = [(line["daemon"], line["event"]) for line in lines]
    assert told[0] == ("prefilld", "request.accepted")
    # Lines are written behind what they tell, so those of both daemons may cross within a moment.
    assert set(told) >= {
        ("prefilld", "handoff.sent"),
        ("decoded", "handoff.adopted"),
        ("prefilld", "handoff.adopted"),
        ("decoded", "lease.pulled"),
        ("prefilld", "lease.released"),
        ("decoded", "handoff.measured"),
    }
    (measured,) = [line for line in lines if line["event"] == "handoff.measured"]
    stages = [measured[f"{name}_us"] for name in ("ready", "adopted", "copy_done", "first_step")]
    assert stages == sorted(stages), "all of them in one line"
    assert ("decoded", "request.ended") in told[-2:]  # prefilld may be slow to take RELEASE


def test_logs_hold_neither_prompts_nor_handles(pair: Pair) -> None:
    """They are the users', and capabilities."""
    secret = "a-secret-word-of-the-user"
    pair.client.generate(secret, raw=True, max_tokens=2)
    text = "".join(pair.log_path(daemon).read_text() for daemon in DAEMONS)
    assert "request.accepted" in text
    assert secret not in text


def test_the_doctor_finds_a_running_pair_well(pair: Pair) -> None:
    """Both answer, they fit, their link is open, and nothing would stop them."""
    model = pair.status()["model"]
    told = json.loads(kvpair(pair, "doctor", "--json", "--model", str(model)))
    assert told["ok"] is True
    by_check = {finding["check"]: finding for finding in told["findings"]}
    assert by_check["prefilld"]["text"].startswith("is serving")
    assert by_check["decoded"]["text"].startswith("is serving")
    assert by_check["link"]["verdict"] == "ok"
    assert "PID namespaces" not in by_check
    assert "memory" not in by_check, "what runs has its memory already"
