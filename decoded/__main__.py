"""`decoded`, or `python -m decoded`: the daemon in the foreground."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.service import run_daemon

if TYPE_CHECKING:
    from shared.service.frame import Service


async def _run(service: Service) -> None:
    from decoded.app import run  # noqa: PLC0415  torch: seconds that `--help` need not wait for

    await run(service)


def main() -> None:
    """Run the daemon; ends the process."""
    run_daemon("decoded", _run)


if __name__ == "__main__":
    main()
