"""The configuration of the pair: `resolve` reads it once, `ResolvedConfig` says whence.

schema       every key: default, unit, range, reason
sources      file, environment and command line as settings
values       one value against its type
resolution   the sources in order, checked as a whole
paths        where the sockets lie
options      the command-line flags that set configuration
"""

from __future__ import annotations

from shared.config.resolution import ResolvedConfig, resolve
from shared.config.schema import Config

__all__ = ["Config", "ResolvedConfig", "resolve"]
