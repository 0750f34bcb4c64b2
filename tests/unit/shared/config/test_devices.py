"""Tests of shared/config/devices.py: what the devices decide, and which do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import Config, resolve
from shared.config.devices import expects_direct, names_one_gpu
from shared.config.sources import parse_assignment
from shared.errors import ConfigError

UUID = "GPU-0a1b2c3d-0000-1111-2222-333344445555"


def resolved(tmp_path: Path, *assignments: str) -> Config:
    return resolve(
        environ={"TMPDIR": str(tmp_path)},
        flags=[parse_assignment(text) for text in assignments],
        num_cores=4,
        system_file=tmp_path / "none.toml",
    ).config


def on(prefilld: str, decoded: str) -> tuple[str, str]:
    return f"prefilld.device={prefilld}", f"decoded.device={decoded}"


def test_without_a_gpu_everything_is_in_shared_memory(tmp_path: Path) -> None:
    """And of a size that a small machine has."""
    config = resolved(tmp_path)
    assert config.pool.backend == "memfd"
    assert (config.pool.num_blocks, config.decoded.num_blocks) == (1024, 1024)


def test_on_gpus_the_pool_is_theirs_and_its_size_is_left_to_them(tmp_path: Path) -> None:
    """Only the daemon sees what its weights have left."""
    config = resolved(tmp_path, *on("cuda:0", "cuda:1"))
    assert config.pool.backend == "cuda"
    assert (config.pool.num_blocks, config.decoded.num_blocks) == (0, 0)
    assert (config.prefilld.memory_fraction, config.decoded.memory_fraction) == (0.85, 0.85)


def test_what_is_configured_goes_before_what_the_devices_decide(tmp_path: Path) -> None:
    config = resolved(
        tmp_path, *on("cuda:0", "cuda:1"), "pool.num_blocks=7", "decoded.memory_fraction=0.5"
    )
    assert config.pool.num_blocks == 7
    assert (config.prefilld.memory_fraction, config.decoded.memory_fraction) == (0.85, 0.5)


@pytest.mark.parametrize(
    ("device", "assignments", "token_budget", "lone_budget"),
    [
        ("cpu", (), 512, 512),
        ("cuda", (), 2048, 4096),
        ("cuda", ("prefilld.token_budget=700",), 700, 1400),
        ("cuda", ("prefilld.lone_budget=8192",), 2048, 8192),
        ("cuda", ("prefilld.lone_budget=100",), 2048, 2048),
    ],
)
def test_a_prompt_that_is_alone_gets_larger_steps_on_a_gpu(
    tmp_path: Path,
    device: str,
    assignments: tuple[str, ...],
    token_budget: int,
    lone_budget: int,
) -> None:
    """Where a larger step wastes less; never smaller ones than beside others."""
    config = resolved(tmp_path, *on(device, device), *assignments).prefilld
    assert (config.token_budget, config.lone_budget) == (token_budget, lone_budget)


@pytest.mark.parametrize(
    ("prefilld", "decoded", "is_one"),
    [
        ("cuda", "cuda", True),
        ("cuda", "cuda:0", True),
        (UUID, UUID.replace("a1b2c3d", "A1B2C3D"), True),
        ("cuda:0", "cuda:1", False),
        (UUID, "cuda:0", False),
    ],
)
def test_two_daemons_on_one_gpu_share_its_memory(
    tmp_path: Path, prefilld: str, decoded: str, is_one: bool
) -> None:
    """Each that took 85 % would leave the other nothing."""
    config = resolved(tmp_path, *on(prefilld, decoded))
    assert names_one_gpu(config) is is_one
    assert config.prefilld.memory_fraction == (0.425 if is_one else 0.85)
    assert config.decoded.memory_fraction == (0.425 if is_one else 0.85)


@pytest.mark.parametrize(
    ("devices", "access", "is_direct"),
    [
        (("cuda", "cuda:0"), "auto", True),
        (("cuda:0", "cuda:1"), "auto", False),
        (("cpu", "cpu"), "auto", False),
        (("cpu", "cpu"), "direct", True),
        (("cuda", "cuda"), "pull", False),
    ],
)
def test_how_blocks_will_be_read_is_known_before_there_is_a_link(
    tmp_path: Path, devices: tuple[str, str], access: str, *, is_direct: bool
) -> None:
    """So that a request which fits only in place is not refused for want of a link."""
    config = resolved(tmp_path, *on(*devices), f"pool.access={access}")
    assert expects_direct(config) is is_direct


def test_two_cpus_are_no_gpu(tmp_path: Path) -> None:
    assert not names_one_gpu(resolved(tmp_path))


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (on("cpu", "cuda"), "'cpu' and decoded.device = 'cuda' are of two kinds; both daemons"),
        (("pool.backend=cuda",), "'cuda' does not go with prefilld.device = 'cpu'"),
        ((*on("cuda", "cuda"), "pool.backend=memfd"), "'memfd' does not go with .* = 'cuda'"),
        (
            (*on("cuda", "cuda"), "prefilld.memory_fraction=0.7"),
            r"memory_fraction = 1\.125 of one GPU; their sum must not be more than 1",
        ),
    ],
)
def test_what_does_not_go_together_is_named(
    tmp_path: Path, assignments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, *assignments)
