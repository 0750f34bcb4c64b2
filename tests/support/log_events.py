"""Every event that the daemons log at warning or above, found in their source."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGES = ("prefilld", "decoded", "shared")
LEVELS = frozenset({"warning", "error", "critical"})


def loud_events(root: Path) -> set[str]:
    """Return the names of events that call for somebody's attention."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            constants = {
                target.id: node.value.value
                for node in tree.body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(tree):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in LEVELS
                    and node.args
                ):
                    name = node.args[0]
                    value = (
                        name.value
                        if isinstance(name, ast.Constant)
                        else constants.get(getattr(name, "id", ""))
                    )
                    if isinstance(value, str) and "." in value:
                        found.add(value)
    return found
