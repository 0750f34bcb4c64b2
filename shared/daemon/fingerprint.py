"""The fingerprint: what both daemons must have in common for one to go on where the other stopped.

Compared at hand-shake, and by a client that resumes an answer.  Every field travels beside the
hash, so that a mismatch is named and not just noticed.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from shared.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.kv.layout import KVLayout
    from shared.model.spec import ModelSpec

Fields = dict[str, str | int | float | bool]


def fingerprint_fields(*, spec: ModelSpec, content_id: str, layout: KVLayout) -> Fields:
    """Return everything the fingerprint is made of, by name.

    Args:
        spec: The model's shape.
        content_id: Tells models of one shape apart.
        layout: The pool's; its number of blocks does not matter.
    """
    fields: Fields = {"kvpair_version": __version__, "model_content": content_id}
    for name, value in spec.fingerprint_fields().items():
        is_scalar = isinstance(value, str | int | float | bool)
        fields[f"model_{name}"] = value if is_scalar else json.dumps(value)
    fields |= layout.fields()
    return fields


def fingerprint(fields: Mapping[str, object]) -> str:
    """Return the hash over fields, as 32 hexadecimal digits; their order does not matter."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def first_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """Return the name of a field that differs or that one side lacks; None where all agree."""
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs or ours[name] != theirs[name]:
            return name
    return None
