"""`prefilld`, or `python -m prefilld`: the daemon in the foreground."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from shared.daemon.listening import succeed
from shared.service import run_daemon

if TYPE_CHECKING:
    from shared.service.frame import Service


async def _run(service: Service) -> None:
    # Before torch is imported, so that clients wait for those seconds and a second instance does
    # not; only the successor of a daemon that is being torn down imports it while it waits.
    listener = await succeed(
        service.socket_path,
        environ=os.environ,
        group=service.config.prefilld.group,
        log=service.log,
        meanwhile=lambda: importlib.import_module("prefilld.app"),
    )
    from prefilld.app import run  # noqa: PLC0415  see above

    await run(service, listener)


def main() -> None:
    """Run the daemon; ends the process."""
    run_daemon("prefilld", _run)


if __name__ == "__main__":
    main()
