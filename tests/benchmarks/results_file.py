"""Files of figures under `results/`: several programs, or phases of one, gather in one file."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

Figures = dict[str, float]


def hardware() -> str:
    """Describe the machine in words."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    described = f"{len(names)} x {names[0] if names else 'GPU'}, torch {torch.__version__}"
    with suppress(metadata.PackageNotFoundError):  # it may be chosen where it is installed
        described += f", flash-attn-4 {metadata.version('flash-attn-4')}"
    return described


def gather(figures: Figures, path: Path, *, program: str, commit: str) -> None:
    """Write figures with where they come from, beside those of other runs that are there.

    Args:
        figures: By name; they replace earlier ones of the same names.
        path: The file.
        program: The module that measured, run with this process's arguments.
        commit: What was measured.
    """
    earlier: dict[str, Any] = {"command": "", "figures": {}}
    if path.exists():
        earlier = json.loads(path.read_text())
    command = " ".join([f"python -m {program}", *sys.argv[1:]])
    commands = [each for each in earlier["command"].split("; ") if each not in ("", command)]
    document = {
        "hardware": hardware(),
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "command": "; ".join([*commands, command]),
        "figures": earlier["figures"] | {name: round(each, 4) for name, each in figures.items()},
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
