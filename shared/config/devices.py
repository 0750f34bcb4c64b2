"""What follows from the two daemons' devices: the pool's backend, its size, and who gets how much.

Pure, and by name only: whether a device exists is for the daemon to find out that uses it.
"""

from __future__ import annotations

from msgspec.structs import replace

from shared.config.schema import (
    DEFAULT_CPU_BLOCKS,
    DEFAULT_MAX_BATCHES,
    DEFAULT_MEMORY_FRACTION,
    DEFAULT_TOKEN_BUDGETS,
    LONE_BUDGET_FACTORS,
    Config,
)
from shared.errors import ConfigError

CPU = "cpu"


def with_device_defaults(config: Config) -> Config:
    """Put numbers and names in place of what is left open and the devices decide.

    `pool.backend = "auto"` becomes what both devices share; `num_blocks = 0` a number on a CPU,
    and stays 0 on a GPU, whose free memory only its daemon sees; `memory_fraction = 0` a share;
    `token_budget = 0`, `lone_budget = 0` and `max_batch = 0` what suits a device of the kind.
    """
    prefilld, decoded, pool = config.prefilld, config.decoded, config.pool
    prefill_kind, decode_kind = (
        "cpu" if device == CPU else "gpu" for device in (prefilld.device, decoded.device)
    )
    token_budget = prefilld.token_budget or DEFAULT_TOKEN_BUDGETS[prefill_kind]
    lone_budget = prefilld.lone_budget or token_budget * LONE_BUDGET_FACTORS[prefill_kind]
    fraction = DEFAULT_MEMORY_FRACTION / (2 if names_one_gpu(config) else 1)
    if prefilld.device == CPU:
        pool = replace(pool, num_blocks=pool.num_blocks or DEFAULT_CPU_BLOCKS)
    if decoded.device == CPU:
        decoded = replace(decoded, num_blocks=decoded.num_blocks or DEFAULT_CPU_BLOCKS)
    if pool.backend == "auto":
        pool = replace(pool, backend="memfd" if prefilld.device == CPU else "cuda")
    return replace(
        config,
        pool=pool,
        prefilld=replace(
            prefilld,
            memory_fraction=prefilld.memory_fraction or fraction,
            token_budget=token_budget,
            lone_budget=max(token_budget, lone_budget),
        ),
        decoded=replace(
            decoded,
            memory_fraction=decoded.memory_fraction or fraction,
            max_batch=decoded.max_batch or DEFAULT_MAX_BATCHES[decode_kind],
        ),
    )


def names_one_gpu(config: Config) -> bool:
    """Whether both daemons are configured to use the same GPU."""
    ours, theirs = (
        "cuda:0" if name == "cuda" else name.casefold()
        for name in (config.prefilld.device, config.decoded.device)
    )
    return ours == theirs != CPU


def expects_direct(config: Config) -> bool:
    """Whether decoded will read whole blocks in place, as far as the configuration can tell.

    Devices of two names may be one GPU: only decoded knows, once there is a link.
    """
    access = config.pool.access
    return access == "direct" or (access == "auto" and names_one_gpu(config))


def check_devices(config: Config) -> None:
    """Refuse devices that cannot work together, or with what was asked of the pool.

    Raises:
        ConfigError: The daemons' devices are of two kinds, the backend is of the other kind, or
            both daemons want more of one GPU than there is.
    """
    prefilld, decoded = config.prefilld, config.decoded
    if (prefilld.device == CPU) != (decoded.device == CPU):
        raise ConfigError(
            f"prefilld.device = {prefilld.device!r} and decoded.device = {decoded.device!r} are of "
            "two kinds",
            hint="both daemons need a GPU, or neither",
        )
    if (config.pool.backend == "memfd") != (prefilld.device == CPU):
        raise ConfigError(
            f"pool.backend = {config.pool.backend!r} does not go with prefilld.device = "
            f"{prefilld.device!r}",
            hint="leave it out: it follows the devices",
        )
    asked = prefilld.memory_fraction + decoded.memory_fraction
    if names_one_gpu(config) and asked > 1:
        raise ConfigError(
            f"prefilld.memory_fraction + decoded.memory_fraction = {asked:g} of one GPU",
            hint="their sum must not be more than 1",
        )
