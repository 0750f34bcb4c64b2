"""The table of all configuration keys, as `shared/README.md` shows it.

    python -m shared.config.reference

prints it, from the schema's fields and the docstrings beneath them.
"""

from __future__ import annotations

import ast
import inspect
import json

import click
import msgspec

from shared.config import schema
from shared.config.values import allowed


def configuration_table() -> str:
    """Return a Markdown table: key, default, what is allowed, what it means."""
    meanings = _docstrings()
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for section, struct in schema.SECTIONS.items():
        for field in msgspec.structs.fields(struct):
            default = "" if field.default in (msgspec.NODEFAULT, None) else _code(field.default)
            meaning = meanings[struct.__name__, field.name]
            lines.append(
                f"| `{section}.{field.name}` | {default} | {allowed(field.type)} | {meaning} |"
            )
    return "\n".join(lines)


def _code(default: object) -> str:
    return f"`{json.dumps(default)}`"


def _docstrings() -> dict[tuple[str, str], str]:
    """Return the text beneath each field, by struct and field; Python itself drops it."""
    texts: dict[tuple[str, str], str] = {}
    for struct in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(struct, ast.ClassDef):
            continue
        for field, text in zip(struct.body, struct.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(meaning))),
                ):
                    texts[struct.name, name] = " ".join(meaning.split())
    return texts


if __name__ == "__main__":
    click.echo(configuration_table())
