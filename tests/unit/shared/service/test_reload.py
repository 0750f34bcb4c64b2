"""What a running daemon takes from a configuration that it reads again."""

from __future__ import annotations

from pathlib import Path

from shared.config import ResolvedConfig, resolve
from shared.config.sources import KEYS, parse_assignment
from shared.service.reload import is_reloadable, reload_config


def resolved(*assignments: str) -> ResolvedConfig:
    return resolve(
        environ={"KVPAIR_SOCKET": "/run/p.sock"},
        flags=[parse_assignment(text) for text in assignments],
        num_cores=2,
        system_file=Path("/nonexistent"),
    )


def test_limits_and_log_level_are_taken_and_the_rest_is_named() -> None:
    current = resolved("log.format=json")
    wanted = resolved("limits.drain_timeout_s=7", "log.level=debug", "pool.num_blocks=9")
    reload = reload_config(current, wanted)
    assert reload.changed == {"limits.drain_timeout_s": 7, "log.level": "debug"}
    assert reload.needs_restart == ("pool.num_blocks", "log.format")
    config = reload.resolved.config
    assert (config.limits.drain_timeout_s, config.log.level) == (7, "debug")
    assert (config.pool.num_blocks, config.log.format) == (1024, "json")
    assert reload.resolved.origins["log.level"] == "flag --set"
    assert reload.resolved.origins["pool.num_blocks"] == "default"


def test_the_same_configuration_changes_nothing() -> None:
    reload = reload_config(resolved(), resolved())
    assert (reload.changed, reload.needs_restart) == ({}, ())
    assert reload.resolved == resolved()


def test_what_a_pool_or_a_socket_is_made_of_is_never_reloadable() -> None:
    taken = {key.split(".")[0] for key in KEYS if is_reloadable(key)}
    assert taken == {"limits", "log"}
