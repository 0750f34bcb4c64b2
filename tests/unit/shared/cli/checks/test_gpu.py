"""`shared.cli.checks.gpu`: what the daemons would find, in the doctor's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shared.cli.checks.finding import Finding, Verdict
from shared.cli.checks.gpu import check_gpus
from shared.config import resolve
from shared.config.sources import parse_assignment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

UUIDS = ["GPU-11111111-aaaa", "GPU-22222222-bbbb"]


def row(code: str, *, is_fatal: bool = True, hint: str | None = "mend it") -> dict[str, Any]:
    return {"code": code, "message": f"{code} is wrong", "hint": hint, "is_fatal": is_fatal}


def examine(
    tmp_path: Path,
    *rows: dict[str, Any],
    devices: tuple[str, str] = ("cuda:0", "cuda:1"),
    **changes: Any,  # noqa: ANN401 - arguments of the check
) -> dict[str, Finding]:
    flags = [
        parse_assignment(f"{daemon}.device={device}")
        for daemon, device in zip(("prefilld", "decoded"), devices, strict=True)
    ]
    config = resolve(environ={}, flags=flags, num_cores=2, system_file=tmp_path / "none").config

    def ask(asked: Sequence[str]) -> dict[str, Any]:
        assert tuple(asked) == devices
        return {"torch_cuda": "13.0", "gpus": UUIDS, "findings": list(rows)}

    return {finding.check: finding for finding in check_gpus(config, **{"ask": ask} | changes)}


def test_a_machine_without_a_gpu_needs_none(tmp_path: Path) -> None:
    """Nothing is imported: the embedded default is the CPU."""

    def ask(_: Sequence[str]) -> dict[str, Any]:
        raise AssertionError("somebody looked")

    found = examine(tmp_path, devices=("cpu", "cpu"), ask=ask)
    assert [(name, finding.verdict) for name, finding in found.items()] == [("GPU", Verdict.OK)]


def test_two_gpus_in_order(tmp_path: Path) -> None:
    found = examine(tmp_path)
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert found["GPU"].text == "cuda:0 = GPU-11111111-aaaa, cuda:1 = GPU-22222222-bbbb"
    assert found["peer access"].text == "each GPU can read the other's memory"
    assert found["torch"].text == "is built for CUDA 13.0"
    assert found["C compiler"].text == "compiles with Python's headers, as Triton will"


def test_one_gpu_needs_no_peer_access(tmp_path: Path) -> None:
    found = examine(tmp_path, devices=("cuda", "cuda:0"))
    assert found["peer access"].text == "both daemons use one GPU: not needed"


@pytest.mark.parametrize(
    ("code", "check"),
    [
        ("peer-access", "peer access"),
        ("cupy", "CuPy"),
        ("c-compiler", "C compiler"),
        ("device-nodes", "device nodes"),
    ],
)
def test_what_would_stop_a_daemon_is_a_failure(tmp_path: Path, code: str, check: str) -> None:
    found = examine(tmp_path, row(code))
    assert found[check].verdict is Verdict.FAIL
    assert (found[check].text, found[check].cure) == (f"{code} is wrong", "mend it")


def test_what_should_be_known_is_a_warning(tmp_path: Path) -> None:
    found = examine(tmp_path, row("mps", is_fatal=False, hint=None))
    assert found["MPS"].verdict is Verdict.WARN
    assert found["MPS"].cure
    assert found["CuPy"].verdict is Verdict.OK


def test_a_look_that_fails_is_told(tmp_path: Path) -> None:
    found = examine(tmp_path, ask=lambda _: "Segmentation fault")
    assert found["GPU"].verdict is Verdict.FAIL
    assert "Segmentation fault" in found["GPU"].text
