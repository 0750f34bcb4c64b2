"""The project's kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race.

    python -m tests.benchmarks.gpu_sanitize

It instruments our kernels and not torch's, over the smallest of `tests/gpu/ops`.  Uninitialised
reads are left to those tests themselves: their pools are full of NaN where nothing was written.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
KERNELS = REPOSITORY / "shared" / "ops" / "triton"

MEMORY_TESTS = (
    "test_gathered_blocks or test_rope_and_kv_write or test_angles or test_the_largest_of_a_row"
    " or test_products_of_one_row or (test_products_of_few_rows and dtype0) or test_contexts_leave"
    " or (test_norms and 576) or (test_gates and 1100) or (test_attention_of_any_group and 3)"
    " or (test_the_same_tokens and 97)"
)
"""For `pytest -k`: every kernel once or a few times; the rest is the same with other sizes."""

RACE_TESTS = "(test_attention_of_any_group and 3) or (test_norms and 576 and dtype2)"
"""Of kernels whose threads share memory; a race check takes several times as long."""

TIMEOUT_S = 300.0
ERROR_STATUS = 86
"""What the tool is told to exit with when it found something."""

MISSING = (
    "compute-sanitizer is not here: not on the PATH, not in /usr/local/cuda*/bin, and not in this "
    "environment; it comes with the CUDA toolkit, and as `pip install nvidia-cuda-sanitizer-api` "
    "for CUDA 13"
)


def find_tool(
    *, roots: Iterable[Path] = (Path("/usr/local"), Path(sysconfig.get_path("purelib")))
) -> Path | None:
    """Return the tool, the newest where there are several, or None."""
    on_path = shutil.which("compute-sanitizer")
    if on_path is not None:
        return Path(on_path)
    patterns = ("cuda*/bin/compute-sanitizer", "nvidia/*/bin/compute-sanitizer")
    found = [path for root in roots for pattern in patterns for path in root.glob(pattern)]
    return max(found, default=None)


def kernel_names() -> list[str]:
    """Return the names of the project's kernels, as they are launched."""
    return sorted(
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("jit" in ast.unparse(each) for each in node.decorator_list)
    )


def command(tool: Path, check: str, tests: str) -> Sequence[str]:
    """Return what runs some tests under one of the tool's checks."""
    filters = [word for name in kernel_names() for word in ("--kernel-name", f"kns={name}")]
    return [
        str(tool),
        *("--tool", check, "--error-exitcode", str(ERROR_STATUS), *filters),
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
        *("-m", "gpu", "-k", tests, "tests/gpu/ops"),
    ]


def main() -> int:
    """Run both checks; return 0 where both are clean."""
    tool = find_tool()
    if tool is None:
        print(MISSING, file=sys.stderr)
        return 1
    print(f"{tool}, {len(kernel_names())} kernels", flush=True)
    # Torch hands out pieces of large allocations, within which nothing is out of bounds.
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = False
    for check, tests in (("memcheck", MEMORY_TESTS), ("racecheck", RACE_TESTS)):
        done = subprocess.run(
            command(tool, check, tests),
            cwd=REPOSITORY,
            env=environ,
            check=False,
            timeout=TIMEOUT_S,
        )
        print(f"{check}: {'clean' if done.returncode == 0 else done.returncode}", flush=True)
        failed |= done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
