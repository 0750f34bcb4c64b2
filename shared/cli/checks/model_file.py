"""The model: is it here, can it be read, how much does it take?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.cli.checks.finding import Finding, from_error, ok
from shared.errors import KvpairError

if TYPE_CHECKING:
    from shared.config import Config
    from shared.model.spec import ModelSpec

RANDOM_PREFIX = "random:"
"""Of models that are made up for measurements and need no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What each daemon takes of memory, in bytes, with weights and pool."""

    prefilld_bytes: int
    decoded_bytes: int


def check_model(config: Config) -> tuple[Finding, Sizes | None]:
    """Read what the model's files say of it, as a daemon does first.

    Returns:
        What was found, and the sizes that follow from it where they are known: not for a model
        that cannot be read, and not for pools that take what a GPU has free.
    """
    from shared.model.describe import describe_model  # noqa: PLC0415  not for `--help`
    from shared.model.fetch import resolve_model  # noqa: PLC0415

    name = config.model.path
    if name.startswith(RANDOM_PREFIX):
        return ok("model", f"{name}: weights are drawn, there is no file"), None
    try:
        path = resolve_model(name)
        spec = describe_model(path).spec
    except KvpairError as error:
        return from_error("model", error), None
    text = (
        f"{path}: {spec.name}, {spec.num_parameters / 1e6:,.0f} M weights in {config.model.dtype}, "
        f"context {spec.max_context_tokens:,}"
    )
    return ok("model", text), _sizes(config, spec)


def _sizes(config: Config, spec: ModelSpec) -> Sizes | None:
    from shared.model.spec import DTYPE_BYTES  # noqa: PLC0415  as above

    pool, decoded, dtype = config.pool, config.decoded, config.model.dtype
    if not pool.num_blocks or not decoded.num_blocks:
        return None
    weight_bytes = spec.num_parameters * DTYPE_BYTES[dtype]
    block_bytes = pool.block_size * spec.kv_bytes_per_token(dtype)
    return Sizes(
        prefilld_bytes=weight_bytes + pool.num_blocks * block_bytes,
        decoded_bytes=weight_bytes + decoded.num_blocks * block_bytes,
    )
