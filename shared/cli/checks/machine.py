"""The machine: Python and its packages, shared memory, namespaces, limits, memory."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shared.cli.checks.finding import Finding, fail, ok, warn
from shared.config.devices import CPU
from shared.kv.memory import available_bytes
from shared.version import __version__

PACKAGES = ("torch", "gguf", "tokenizers", "uvloop")
"""What daemons cannot start without, beside what the command itself needs."""

SHM = Path("/dev/shm")  # noqa: S108  looked at, not written

MACHINE_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the first PID namespace; the kernel numbers it so since 3.8."""

ENOUGH_DESCRIPTORS = 4096 + 256
"""One for each of prefilld's 4,096 clients, and what a daemon has open beside."""

MIN_DESCRIPTORS = 256
"""With fewer a daemon refuses clients while it is nearly idle."""

GIB = 1 << 30


def check_software(installed: Mapping[str, str | None] | None = None) -> Finding:
    """Look for what the daemons import.

    Args:
        installed: Version by package; None asks the interpreter.
    """
    versions = _versions(PACKAGES) if installed is None else installed
    if missing := [name for name, version in versions.items() if version is None]:
        return fail(
            "software",
            f"{', '.join(missing)} cannot be found by {platform.python_implementation()} "
            f"{platform.python_version()}",
            cure="install kvpair again (make install, or make install-system)",
        )
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return ok("software", f"kvpair {__version__}, Python {platform.python_version()}, {named}")


def check_attention(
    name: str, device: str, *, is_installed: Callable[[str], bool] | None = None
) -> Finding | None:
    """Look for the library that is to compute attention; None where none is asked for by name.

    Args:
        name: `prefilld.attention`.
        device: prefilld's.
        is_installed: Whether there is a package; None asks the interpreter.
    """
    if name in {"auto", "torch"}:
        return None
    is_there = _is_installed if is_installed is None else is_installed
    cure = "set prefilld.attention to auto, which takes what there is"
    if device == CPU:
        return fail("attention", f"{name} is for GPUs, and prefilld is on the CPU", cure=cure)
    if not is_there(name):
        return fail("attention", f"{name} is not installed", cure=f"install it, or {cure}")
    return ok("attention", f"{name}; prefilld tries it when it starts")


def _is_installed(package: str) -> bool:
    return _versions([package])[package] is not None


def _versions(packages: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def check_memfd() -> Finding:
    """Try what a pool on the CPU is made of: memory that can be sealed."""
    try:
        fd = os.memfd_create("kvpair-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(fd)
    except OSError as error:
        return fail(
            "memfd",
            f"shared memory cannot be made: {error.strerror}",
            cure="allow memfd_create and F_ADD_SEALS in this sandbox's system-call filter",
        )
    return ok("memfd", "shared memory can be made and sealed")


def check_shm(path: Path = SHM, *, is_needed: bool) -> Finding:
    """Look at the folder through which CUDA's events cross processes.

    Args:
        path: Of the mount.
        is_needed: Whether a GPU is used; a pool on the CPU does without.
    """
    if not path.is_dir():
        fault = f"{path} is not there"
    elif not os.access(path, os.W_OK):
        fault = f"{path} may not be written"
    else:
        return ok("shared memory", f"{path} is there and writable")
    if not is_needed:
        return ok("shared memory", f"{fault}; no GPU is used, so nothing needs it")
    return fail("shared memory", fault, cure="mount a tmpfs there, the same one for both daemons")


def check_pid_namespace(inode: int | None = None) -> Finding:
    """Tell whether this is the machine's own PID namespace.

    Args:
        inode: Of /proc/self/ns/pid; None looks.
    """
    if inode is None:
        inode = Path("/proc/self/ns/pid").stat().st_ino
    if inode == MACHINE_PID_NAMESPACE:
        return ok("PID namespace", "the machine's own")
    return ok(
        "PID namespace",
        f"a container's ({inode}): both daemons belong into one, or into two in which "
        "their pids differ",
    )


def check_limits(limits: tuple[int, int] | None = None) -> Finding:
    """Look at how many descriptors a process may have.

    Args:
        limits: The soft and the hard one; None asks the kernel.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    cure = f"ulimit -n {ENOUGH_DESCRIPTORS}, or LimitNOFILE={ENOUGH_DESCRIPTORS} in the units"
    text = f"a process started here may open {soft:,} descriptors"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_DESCRIPTORS:
        return ok("limits", text)
    if soft < MIN_DESCRIPTORS:
        return fail("limits", f"{text}, and each client takes one", cure=cure)
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_DESCRIPTORS:
        cure += f" (as root: the hard limit is {hard:,})"
    return warn("limits", f"{text}; {ENOUGH_DESCRIPTORS:,} let 4,096 clients connect", cure=cure)


def check_memory(
    *, prefilld_bytes: int, decoded_bytes: int, available: int | None = None
) -> Finding:
    """Compare what the daemons will take with what there is.

    Args:
        prefilld_bytes: Its weights and its pool, which is taken at the start.
        decoded_bytes: Its weights and its pool, which is taken as it fills.
        available: What can be had; None asks the kernel.
    """
    if available is None:
        available = available_bytes()
    total = prefilld_bytes + decoded_bytes
    text = f"the pair takes up to {total / GIB:.1f} GiB"
    if available is None:
        return warn(
            "memory", f"{text}; the kernel does not tell what is there", cure="look at free -h"
        )
    text += f", {available / GIB:.1f} GiB are available"
    cure = "fewer pool.num_blocks and decoded.num_blocks, or a smaller model"
    if prefilld_bytes > available:
        return fail("memory", text, cure=cure)
    if total > available:
        return warn("memory", text, cure=cure)
    return ok("memory", text)
