"""Writes the generated parts of `README.md` from the structs, tables, limits and codes.

`python -m protocol.readme` replaces what stands between `<!-- generated: NAME -->` and
`<!-- end -->`, and leaves everything else as it was written.  A test fails while they differ.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import msgspec
from msgspec import inspect as shapes

from protocol import client_messages, errors, limits, link_messages, timings
from protocol import messages as m
from protocol.states import EXPLANATIONS, INITIAL, RECEIVES, SENDS, Role, Row, State

README = Path(__file__).with_name("README.md")

_SECTION = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

_DIRECTIONS = (
    ("client to prefilld", m.ToPrefilld),
    ("client to decoded", m.ToDecoded),
    ("daemon to client", m.FromDaemon),
    ("prefilld to decoded", m.LinkToDecoded),
    ("decoded to prefilld", m.LinkToPrefilld),
)


def render(text: str) -> str:
    """Return `text` with every generated part made anew.

    Raises:
        KeyError: A marker names a part that there is none of.
    """
    return _SECTION.sub(lambda found: f"{found[1]}\n{_PARTS[found[2]]()}\n{found[3]}", text)


# --- messages --------------------------------------------------------------------------------


def _client_messages() -> str:
    return "\n\n".join((_messages_of(client_messages), _messages_of(timings)))


def _link_messages() -> str:
    return _messages_of(link_messages)


def _messages_of(module: ModuleType) -> str:
    docs = _attribute_docs(module)
    kinds = [
        kind
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, m.Message | m.Part)
        and kind.__module__ == module.__name__
        and not name.startswith("_")
        and (issubclass(kind, m.Part) or kind.__struct_config__.tag in m.MESSAGE_TYPES)
    ]
    return "\n\n".join(_message(kind, docs) for kind in kinds)


def _message(kind: type[msgspec.Struct], docs: dict[tuple[str, str], str]) -> str:
    directions = [where for where, union in _DIRECTIONS if kind in get_args(union)]
    title = f"### `{kind.__struct_config__.tag}`" if directions else f"### {kind.__name__}"
    lines = [title, "", inspect.cleandoc(kind.__doc__ or "")]
    if directions:
        lines += ["", f"*{', '.join(directions)}*"]
    info = shapes.type_info(kind)
    assert isinstance(info, shapes.StructType)
    if info.fields:
        lines += ["", "| field | type | |", "|---|---|---|"]
    for field in info.fields:
        doc = next(
            (
                docs[c.__name__, field.name]
                for c in kind.__mro__
                if (c.__name__, field.name) in docs
            ),
            "",
        )
        lines.append(f"| `{field.name}` | {_type(field.type)}{_default(field)} | {_cell(doc)} |")
    return "\n".join(lines)


def _default(field: shapes.Field) -> str:
    if field.required:
        return ""
    if field.default_factory is not msgspec.NODEFAULT:
        return ", default empty"
    if isinstance(field.default, m.Part):
        return ", default all defaults"
    return f", default `{_literal(field.default)}`"


def _literal(value: object) -> str:
    names = {None: "nil", True: "true", False: "false", b"": "empty"}
    return names[value] if value is None or isinstance(value, bool | bytes) else str(value)


def _type(shape: shapes.Type) -> str:
    match shape:
        case shapes.IntType():
            return f"integer{_bounds(shape.ge, shape.le if shape.lt is None else shape.lt - 1)}"
        case shapes.FloatType():
            low = f" > {_number(shape.gt)}" if shape.gt is not None else ""
            return f"number{low}{_bounds(shape.ge, shape.le)}"
        case shapes.StrType():
            choice = re.fullmatch(r"\^\(([a-z|]+)\)\\Z", shape.pattern or "")
            if choice:
                return " or ".join(f"`{word}`" for word in choice[1].split("|"))
            pattern = f" matching `{shape.pattern.removesuffix('Z')}Z`" if shape.pattern else ""
            return f"string{_length(shape.min_length, shape.max_length)}{pattern}"
        case shapes.BytesType():
            return f"bytes{_length(shape.min_length, shape.max_length)}"
        case shapes.BoolType():
            return "boolean"
        case shapes.NoneType():
            return "nil"
        case shapes.ListType():
            return (
                f"list{_length(shape.min_length, shape.max_length)} of ({_type(shape.item_type)})"
            )
        case shapes.DictType():
            return f"map{_length(shape.min_length, shape.max_length)} of {_type(shape.value_type)}"
        case shapes.UnionType():
            return " or ".join(map(_type, shape.types))
        case shapes.StructType():
            return f"[{shape.cls.__name__}](#{shape.cls.__name__.lower()})"
        case shapes.CustomType() if shape.cls is object:
            return "plain values"
        case shapes.Metadata():
            return _type(shape.type)
        case _:
            raise TypeError(f"no words for {shape!r}")


def _bounds(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if low is None:
        return f" ≤ {_number(high)}"
    return f" {_number(low)} … {_number(high)}"


def _length(low: int | None, high: int | None) -> str:
    if low == high:
        return "" if low is None else f"[{low}]"
    return f"[{low or 0} … {'' if high is None else _number(high)}]"


def _number(value: int | float | None) -> str:
    """Return a bound as people read it: powers of two from 2^20 on as such."""
    for offset, suffix in ((0, ""), (1, " - 1")):
        if isinstance(value, int) and value > 1 << 19 and (value + offset).bit_count() == 1:
            return f"2^{(value + offset).bit_length() - 1}{suffix}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


# --- states ----------------------------------------------------------------------------------


def _states() -> str:
    return "\n\n".join(map(_role, Role))


def _role(role: Role) -> str:
    states = [state for state in State if state in SENDS[role] or state in RECEIVES[role]]
    lines = [
        f"### {role.value}",
        "",
        f"Begins in `{INITIAL[role].value}`.",
        "",
        "| state | | may send | may receive |",
        "|---|---|---|---|",
    ]
    for state in states:
        sends, receives = (_row(table.get(state, {})) for table in (SENDS[role], RECEIVES[role]))
        lines.append(f"| `{state.value}` | {EXPLANATIONS[state]} | {sends} | {receives} |")
    return "\n".join(lines)


def _row(row: Row) -> str:
    by_target: dict[State, list[str]] = {}
    for kind, target in row.items():
        by_target.setdefault(target, []).append(f"`{kind.__struct_config__.tag}`")
    return "; ".join(
        f"{' '.join(sorted(tags))} → {target.value}" for target, tags in by_target.items()
    )


def _diagram(role: Role) -> str:
    labels: dict[tuple[State, State], list[str]] = {}
    for table, arrow in ((SENDS[role], "↑"), (RECEIVES[role], "↓")):
        for state, row in table.items():
            for kind, target in row.items():
                tag = kind.__struct_config__.tag
                labels.setdefault((state, target), []).append(f"{arrow}{tag}")
    edges = [f"    [*] --> {_node(INITIAL[role])}"]
    for (state, target), moves in labels.items():
        if state is not State.FAILED and State.CLOSED not in (state, target):
            edges.append(f"    {_node(state)} --> {_node(target)}: {' '.join(moves)}")
    return "\n".join(["```mermaid", "stateDiagram-v2", *edges, "```"])


def _node(state: State) -> str:
    return state.value.replace("-", "_")


# --- limits and codes ------------------------------------------------------------------------


def _limits() -> str:
    docs = _attribute_docs(limits)
    lines = ["| limit | value | why |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {_number(value)} | {_cell(docs.get(('', name), ''))} |"
        for name, value in vars(limits).items()
        if name.isupper()
    ]
    return "\n".join(lines)


def _codes() -> str:
    classes = {
        kind.code: kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.ProtocolError)
        and "code" in vars(kind)
    }
    lines = ["| code | meaning | raised as |", "|---|---|---|"]
    for code, meaning in errors.CODES.items():
        kind = classes.get(code)
        name = f"`{kind.__name__}`" if kind and kind is not errors.ProtocolError else ""
        lines.append(f"| `{code}` | {meaning} | {name} |")
    return "\n".join(lines)


# --- help ------------------------------------------------------------------------------------


def _attribute_docs(module: ModuleType) -> dict[tuple[str, str], str]:
    """Return the strings below attributes, by class name ("" for the module) and attribute."""
    tree = ast.parse(inspect.getsource(module))
    docs: dict[tuple[str, str], str] = {}
    owners: list[ast.Module | ast.ClassDef] = [tree]
    owners += [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for owner in owners:
        name = owner.name if isinstance(owner, ast.ClassDef) else ""
        for before, after in zip(owner.body, owner.body[1:], strict=False):
            target = (
                before.target
                if isinstance(before, ast.AnnAssign)
                else before.targets[0]
                if isinstance(before, ast.Assign)
                else None
            )
            if (
                isinstance(target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[name, target.id] = inspect.cleandoc(after.value.value)
    return docs


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


_PARTS = {
    "client-messages": _client_messages,
    "link-messages": _link_messages,
    "client-diagram": lambda: _diagram(Role.CLIENT),
    "link-diagram": lambda: _diagram(Role.PREFILLD_LINK),
    "states": _states,
    "limits": _limits,
    "codes": _codes,
}

if __name__ == "__main__":
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
