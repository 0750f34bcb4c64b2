"""The GPUs, where they are used: what the daemons will find of them, and Triton its C compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shared.cli.checks.finding import Finding, fail, ok, warn

if TYPE_CHECKING:
    from shared.config import Config

CPU = "cpu"

REPORT_TIMEOUT_S = 120.0
"""For gigabytes of libraries to be read from a cold disk."""

PEER_ACCESS, C_COMPILER = "peer access", "C compiler"

Ask = Callable[[Sequence[str]], "dict[str, Any] | str"]
"""Takes both devices; returns the report, or why there is none."""


def check_gpus(config: Config, *, ask: Ask | None = None) -> list[Finding]:
    """Look at everything that the configured devices need.

    Args:
        config: Which devices.
        ask: Makes the report; None asks another interpreter, for what it imports may crash.
    """
    devices = config.prefilld.device, config.decoded.device
    if set(devices) == {CPU}:
        return [ok("GPU", "none is used: both devices are cpu")]
    report = (_ask if ask is None else ask)(devices)
    if isinstance(report, str):
        cure = "python3 -m shared.daemon.gpu_report cuda:0 cuda:0 shows all of it"
        return [fail("GPU", f"cannot be looked at: {report}", cure=cure)]
    findings = []
    if gpus := report["gpus"]:
        listed = ", ".join(f"cuda:{index} = {uuid}" for index, uuid in enumerate(gpus))
        findings.append(ok("GPU", listed))
    if report["torch_cuda"] is not None:
        findings.append(ok("torch", f"is built for CUDA {report['torch_cuda']}"))
    for row in report["findings"]:
        make = fail if row["is_fatal"] else warn
        cure = row["hint"] or "nothing, unless something else is wrong as well"
        findings.append(make(_subject(row["code"]), row["message"], cure=cure))
    if not any(row["is_fatal"] for row in report["findings"]):
        findings.append(ok("CuPy", "can be imported"))
        findings.append(_peer_access(devices))
    if not any(row["code"] == "c-compiler" for row in report["findings"]):
        findings.append(ok(C_COMPILER, "compiles with Python's headers, as Triton will"))
    return findings


def _subject(code: str) -> str:
    """Return what a finding is about, in a person's words."""
    named = {"c-compiler": C_COMPILER, "cupy": "CuPy", "mps": "MPS", "mig": "MIG"}
    return named.get(code, code.replace("-", " "))


def _peer_access(devices: Sequence[str]) -> Finding:
    names = {"cuda:0" if device == "cuda" else device for device in devices}
    if len(names) == 1:
        return ok(PEER_ACCESS, "both daemons use one GPU: not needed")
    return ok(PEER_ACCESS, "each GPU can read the other's memory")


def _ask(devices: Sequence[str]) -> dict[str, Any] | str:
    command = [sys.executable, "-P", "-m", "shared.daemon.gpu_report", *devices]
    try:
        done = subprocess.run(  # noqa: S603  the command is ours
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=REPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {REPORT_TIMEOUT_S:g} s"
    if done.returncode != 0:
        last_words = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        return last_words[0]
    report = json.loads(done.stdout)
    return report if isinstance(report, dict) else "the answer makes no sense"
