"""Kernels on the CPU: these tests run in a process of their own, under Triton's interpreter.

Triton looks at `TRITON_INTERPRET` when it is first imported, and other tests may have imported it.
`test_interpreter.py` starts that process; to see single tests, start it yourself:
`TRITON_INTERPRET=1 pytest tests/unit/shared/ops/triton`.
"""

from __future__ import annotations

import os

IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = ["test_interpreter.py"] if IS_INTERPRETER else ["test_kernel_*.py"]
