"""The GPUs: driver, devices, peer access, CuPy, torch, a C compiler; only where they are used."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shared.cli.checks.finding import Finding, fail, from_error, ok
from shared.errors import KvpairError
from shared.kv.cuda_driver import CudaDriver

if TYPE_CHECKING:
    from shared.config import Config

CPU = "cpu"

IMPORT_TIMEOUT_S = 120.0
"""For a library of gigabytes to be read from a cold disk."""

CUPY_PROGRAM = "import cupy; print(cupy.__version__, cupy.cuda.runtime.runtimeGetVersion())"
TORCH_PROGRAM = "import torch; print(torch.__version__, torch.version.cuda or 'none')"


class Gpus(Protocol):
    """What is asked of the driver; `CudaDriver` has it."""

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver."""

    def num_devices(self) -> int:
        """How many GPUs this process sees."""

    def device_uuid(self, index: int) -> str:
        """A GPU's identity."""


Run = Callable[[str], "str | None"]
"""Runs a program of one line in another interpreter; returns its output, or None if it failed."""


def check_gpus(
    config: Config,
    *,
    load: Callable[[], Gpus] = CudaDriver.load,
    run: Run | None = None,
    find_program: Callable[[str], str | None] = shutil.which,
) -> list[Finding]:
    """Look at everything that the configured devices need.

    Args:
        config: Which devices.
        load: Loads the driver.
        run: Runs a program in another interpreter: what it imports may crash.
        find_program: Finds a program by name.
    """
    wanted = {"prefilld": config.prefilld.device, "decoded": config.decoded.device}
    if set(wanted.values()) == {CPU}:
        return [ok("GPU", "none is used: both devices are cpu")]
    try:
        driver = load()
        uuids = [driver.device_uuid(index) for index in range(driver.num_devices())]
    except KvpairError as error:
        return [from_error("driver", error)]
    listed = ", ".join(f"cuda:{index} = {uuid}" for index, uuid in enumerate(uuids)) or "none"
    findings = [ok("driver", f"CUDA {_driver_version(driver)}; GPUs: {listed}")]
    indices = []
    for name, text in wanted.items():
        found = _matching(text, uuids)
        if len(found) == 1:
            indices.append(found[0])
            continue
        fault = "several of them" if found else "none of them"
        findings.append(
            fail(
                f"{name}.device",
                f"{text!r} names {fault}",
                cure="choose one of those above; CUDA_VISIBLE_DEVICES may hide some",
            )
        )
    if len(indices) == len(wanted):
        findings.append(_check_peer_access(driver, *indices))
    run = _run if run is None else run
    findings.append(_check_cupy(run))
    findings.append(_check_torch(run))
    findings.append(_check_compiler(find_program))
    return findings


def _driver_version(driver: Gpus) -> str:
    version = ctypes.c_int()
    driver.call("cuDriverGetVersion", ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _matching(text: str, uuids: list[str]) -> list[int]:
    """Return which GPUs a configured name means, as the daemons read it."""
    if text.startswith("cuda"):
        index = int(text.partition(":")[2] or 0)
        return [index] if index < len(uuids) else []
    return [at for at, uuid in enumerate(uuids) if uuid.casefold().startswith(text.casefold())]


def _check_peer_access(driver: Gpus, first: int, second: int) -> Finding:
    if first == second:
        return ok("peer access", "both daemons use one GPU: not needed")
    for ours, theirs in ((first, second), (second, first)):
        answer = ctypes.c_int()
        try:
            driver.call("cuDeviceCanAccessPeer", ctypes.byref(answer), ours, theirs)
        except KvpairError as error:
            return from_error("peer access", error)
        if not answer.value:
            return fail(
                "peer access",
                f"cuda:{ours} cannot read cuda:{theirs}'s memory",
                cure="use one GPU for both daemons, or another pair (nvidia-smi topo -p2p r)",
            )
    return ok("peer access", f"cuda:{first} and cuda:{second} can read each other's memory")


def _check_cupy(run: Run) -> Finding:
    output = run(CUPY_PROGRAM)
    if output is None:
        return fail("CuPy", "cannot be imported", cure="install kvpair's extra `cuda` or `cuda13`")
    return ok("CuPy", output)


def _check_torch(run: Run) -> Finding:
    output = run(TORCH_PROGRAM)
    if output is None:
        return fail("torch", "cannot be imported", cure="make install")
    if output.endswith("none"):
        return fail(
            "torch",
            f"{output.split()[0]} is built without CUDA",
            cure="install a build with CUDA: make install TORCH=torch==… with its package index",
        )
    return ok("torch", f"{output.split()[0]}, built for CUDA {output.split()[-1]}")


def _check_compiler(find_program: Callable[[str], str | None]) -> Finding:
    for name in ("cc", "gcc", "clang"):
        if path := find_program(name):
            return ok("C compiler", path)
    return fail(
        "C compiler",
        "none is there, and Triton builds the launchers of its kernels with one",
        cure="install gcc",
    )


def _run(program: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603  one of the programs above
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
