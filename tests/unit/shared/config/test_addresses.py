"""`shared.config.addresses`: metrics stay on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import resolve
from shared.config.addresses import LoopbackAddress, parse_http_address
from shared.config.sources import parse_assignment
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", LoopbackAddress("127.0.0.1", 9464)),
        ("localhost:9464", LoopbackAddress("127.0.0.1", 9464)),
        ("127.3.2.1:0", LoopbackAddress("127.3.2.1", 0)),
        ("[::1]:65535", LoopbackAddress("::1", 65535)),
        ("/run/kvpair/metrics.sock", Path("/run/kvpair/metrics.sock")),
    ],
)
def test_loopback_and_paths_are_taken(text: str, address: object) -> None:
    parsed = parse_http_address(text, origin="file x")
    assert parsed == address
    if isinstance(parsed, LoopbackAddress) and "localhost" not in text:
        assert str(parsed) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0.0.0.0:9464", "can be reached from other machines"),
        ("[::]:9464", "can be reached from other machines"),
        ("192.168.1.5:9464", "can be reached from other machines"),
        ("example.org:9464", "'example.org' .* is no address"),
        (":9464", "is no address"),
        ("9464", "is no address to tell metrics at"),
        ("127.0.0.1:", "is no address to tell metrics at"),
        ("127.0.0.1:65536", "is no address to tell metrics at"),
        ("127.0.0.1:-1", "is no address to tell metrics at"),
        ("127.0.0.1:\N{ARABIC-INDIC DIGIT ONE}", "is no address to tell metrics at"),
        ("metrics.sock", "is no address to tell metrics at"),
        ("/" + "x" * 120, "the kernel takes at most 107"),
    ],
)
def test_anything_else_is_refused_by_where_it_stands(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        parse_http_address(text, origin="file /etc/x.toml")
    assert "file /etc/x.toml" in str(refused.value)


def test_both_daemons_cannot_have_one_address(tmp_path: Path) -> None:
    flags = [
        parse_assignment(f"{daemon}.metrics={host}:9464")
        for daemon, host in (("prefilld", "localhost"), ("decoded", "127.0.0.1"))
    ]
    with pytest.raises(ConfigError, match=r"prefilld\.metrics and decoded\.metrics are both"):
        resolve(environ={}, flags=flags, num_cores=2, system_file=tmp_path / "none")
