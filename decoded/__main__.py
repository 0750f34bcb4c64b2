"""`decoded`, or `python -m decoded`: the daemon in the foreground."""

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
        group=service.config.decoded.group,
        log=service.log,
        meanwhile=lambda: importlib.import_module("decoded.app"),
    )
    from decoded.app import run  # noqa: PLC0415  see above

    await run(service, listener)


def main() -> None:
    """Run the daemon; ends the process."""
    run_daemon("decoded", _run)


if __name__ == "__main__":
    main()
