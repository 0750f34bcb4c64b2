"""What a running daemon takes from a configuration that it reads again.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shared.config import ResolvedConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMITS = "limits."
LOG_KEYS = ("log.level", "log.prompts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """The configuration from now on."""

    resolved: ResolvedConfig
    changed: Mapping[str, object]
    """Keys that take effect, with their new values."""
    needs_restart: tuple[str, ...]
    """Keys that differ as well and keep their old values."""


def reload_config(current: ResolvedConfig, wanted: ResolvedConfig) -> Reload:
    """Take what can be changed while serving: everything in `limits`, and what is logged.

    Args:
        current: What the daemon runs with.
        wanted: What the sources say now.
    """
    before, after = current.values(), wanted.values()
    differing = [key for key in after if before[key] != after[key]]
    changed = {key: after[key] for key in differing if is_reloadable(key)}
    new_log = wanted.config.log
    config = replace(
        current.config,
        limits=wanted.config.limits,
        log=replace(current.config.log, level=new_log.level, prompts=new_log.prompts),
    )
    origins = {
        key: (wanted if is_reloadable(key) else current).origins[key] for key in current.origins
    }
    return Reload(
        resolved=ResolvedConfig(config=config, origins=origins, warnings=wanted.warnings),
        changed=changed,
        needs_restart=tuple(key for key in differing if key not in changed),
    )


def is_reloadable(key: str) -> bool:
    """Whether a daemon takes a new value of this `section.key` while it runs."""
    return key.startswith(LIMITS) or key in LOG_KEYS
