"""Runs a plan of hand-overs between two processes and compares what they saw, block by block."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.handovers.plan import Plan, Report

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

START_TIMEOUT_S = 120.0
"""For two processes to import torch and take their pools, on a machine that is busy."""


class SideError(Exception):
    """One of the two processes failed; the text is its traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run."""

    num_handovers: int
    """That were pulled whole, and compared."""
    num_blocks: int
    """In them."""
    num_differing: int
    """Hand-overs of which a block's digest differs."""
    num_voided: int
    """Hand-overs that were taken back under the copy, and which the taker knew to be void."""
    num_aborted: int
    wall_s: float
    """Start of the processes included."""


def run_handovers(plan: Plan) -> Outcome:
    """Run a plan.

    Raises:
        SideError: A process failed, or died.
    """
    began_s = time.monotonic()
    context = multiprocessing.get_context("spawn")
    ours_of_maker, maker_report = context.Pipe()
    ours_of_taker, taker_report = context.Pipe()
    maker_link, taker_link = context.Pipe()
    processes = [
        context.Process(target=_side, args=("maker", plan, maker_link, maker_report)),
        context.Process(target=_side, args=("taker", plan, taker_link, taker_report)),
    ]
    try:
        for process in processes:
            process.start()
        for connection in (maker_link, maker_report, taker_link, taker_report):
            connection.close()  # theirs alone now, so that a death shows as the end of the file
        deadline_s = began_s + START_TIMEOUT_S + plan.timeout_s
        taken = _report(ours_of_taker, deadline_s)
        made = _report(ours_of_maker, deadline_s)
        return _compare(made, taken, wall_s=time.monotonic() - began_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
        ours_of_maker.close()
        ours_of_taker.close()


def _compare(made: Report, taken: Report, *, wall_s: float) -> Outcome:
    return Outcome(
        num_handovers=len(taken.digests),
        num_blocks=sum(map(len, taken.digests.values())),
        num_differing=sum(
            digests != made.digests[lease_id] for lease_id, digests in taken.digests.items()
        ),
        num_voided=taken.num_voided,
        num_aborted=made.num_aborted,
        wall_s=wall_s,
    )


def _report(connection: Connection, deadline_s: float) -> Report:
    if not connection.poll(max(0.0, deadline_s - time.monotonic())):
        raise SideError("a side does not report in time")
    try:
        report: Report | str = connection.recv()
    except EOFError as error:
        raise SideError("a side died") from error
    if isinstance(report, str):
        raise SideError(report)
    return report


def _side(name: str, plan: Plan, link: Connection, report: Connection) -> None:
    """Be one of the two processes."""
    # Here, so that whoever plans a run need not load torch and the engines.
    from tests.support.handovers.maker import Maker
    from tests.support.handovers.taker import Taker

    try:
        report.send((Maker if name == "maker" else Taker)(plan, link).run())
        report.recv()  # until whoever started it hangs up: pools and events live as long
    except EOFError:
        pass
    except Exception:
        report.send(f"{name}:\n{traceback.format_exc()}")
