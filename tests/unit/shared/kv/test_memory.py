"""Tests of shared/kv/memory.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.kv.errors import PoolAllocationError, PoolShortageError
from shared.kv.memory import available_bytes, blocks_from_memory, require_available


def never(_: float) -> None:
    raise AssertionError("somebody waited")


MEMINFO = "MemTotal:       24689152 kB\nMemFree:  1000 kB\nMemAvailable:    2048 kB\n"


def machine(tmp_path: Path, *, groups: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Write what a kernel would tell, and return the two folders."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self" / "cgroup").write_text(groups)
    for path, limit in limits.items():
        (cgroup / path).mkdir(parents=True, exist_ok=True)
        (cgroup / path / "memory.max").write_text(limit)
    return proc, cgroup


def test_the_machine_bounds_what_is_available(tmp_path: Path) -> None:
    """MemAvailable counts what the kernel can reclaim; MemFree does not."""
    assert available_bytes(*machine(tmp_path, groups="0::/\n", limits={})) == 2048 * 1024


@pytest.mark.parametrize("path", ["", "system.slice", "system.slice/prefilld.service"])
def test_any_control_group_above_the_process_bounds_it(tmp_path: Path, path: str) -> None:
    """A container sets its limit at the root that it sees, a service on itself."""
    limits = {"system.slice/prefilld.service": "max\n", path: "4096\n"}
    groups = "4:memory:/elsewhere\n0::/system.slice/prefilld.service\n"
    assert available_bytes(*machine(tmp_path, groups=groups, limits=limits)) == 4096


def test_a_kernel_that_tells_nothing_bounds_nothing(tmp_path: Path) -> None:
    """Then the allocation itself has to fail."""
    assert available_bytes(tmp_path, tmp_path) is None


def test_what_can_never_fit_is_refused_at_once_with_both_numbers() -> None:
    """Linux would promise it, and kill somebody once it is used."""
    require_available(1, sleep=never)
    with pytest.raises(
        PoolAllocationError, match=r"1125899906842624 bytes: \d+ bytes of mem"
    ) as told:
        require_available(1 << 50, sleep=never)
    assert not isinstance(told.value, PoolShortageError)


def test_a_limit_that_is_too_small_is_not_waited_for(tmp_path: Path) -> None:
    """It stays as it is, whoever ends."""
    proc, cgroup = machine(tmp_path, groups="0::/pod\n", limits={"pod": "4096"})
    with pytest.raises(PoolAllocationError, match="4096 bytes of memory are available") as told:
        require_available(5000, sleep=never, proc=proc, cgroup=cgroup)
    assert not isinstance(told.value, PoolShortageError)


def test_memory_of_a_process_that_ends_is_waited_for(tmp_path: Path) -> None:
    """A prefilld that was killed leaves its pool to decoded, which lets go of it a moment later."""
    proc, cgroup = machine(tmp_path, groups="0::/\n", limits={})
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            (proc / "meminfo").write_text(MEMINFO.replace(" 2048 kB", " 20480 kB"))

    require_available(4 << 20, sleep=sleep, proc=proc, cgroup=cgroup)
    assert len(pauses) == 3


def test_memory_that_others_keep_is_a_shortage(tmp_path: Path) -> None:
    """Another start may do, so its code is one after which it is tried."""
    proc, cgroup = machine(tmp_path, groups="0::/\n", limits={})
    pauses: list[float] = []
    with pytest.raises(PoolShortageError, match=r"2097152 bytes of memory are .*holds the rest"):
        require_available(4 << 20, patience_s=1.0, sleep=pauses.append, proc=proc, cgroup=cgroup)
    assert sum(pauses) == pytest.approx(1.0)


def test_a_pool_takes_its_share_of_the_free_memory() -> None:
    """Rounded down to what can be allocated, so that the share is never passed."""
    num_blocks = blocks_from_memory(
        free_bytes=100 << 20, total_bytes=1 << 40, fraction=0.5, block_bytes=3 << 20
    )
    assert num_blocks == 16
    assert (
        blocks_from_memory(free_bytes=5 << 20, total_bytes=8 << 20, fraction=1, block_bytes=1 << 20)
        == 4
    )


def test_block_ids_bound_a_pool_whatever_the_memory() -> None:
    """They are int32 on the device."""
    assert (
        blocks_from_memory(free_bytes=1 << 50, total_bytes=1 << 50, fraction=1, block_bytes=16)
        == (1 << 31) - 1
    )


def test_two_daemons_whose_shares_add_up_to_one_both_fit() -> None:
    """In whatever order they look, and at once too."""
    free_bytes, block_bytes = 80 << 30, 5_242_880
    one = blocks_from_memory(
        free_bytes=free_bytes, total_bytes=free_bytes, fraction=0.5, block_bytes=block_bytes
    )
    assert 2 * one * block_bytes <= free_bytes


@pytest.mark.parametrize("free_bytes", [0, 10 << 20])
def test_a_share_that_holds_no_block_is_refused_with_the_numbers(free_bytes: int) -> None:
    with pytest.raises(PoolAllocationError, match=rf"0\.3 of the {free_bytes} bytes .* 8388608"):
        blocks_from_memory(
            free_bytes=free_bytes, total_bytes=8 << 20, fraction=0.3, block_bytes=2 << 20
        )
