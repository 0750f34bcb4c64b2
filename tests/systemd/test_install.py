"""`systemd/install.sh`: what it puts where, and what it leaves alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "systemd/install.sh"
UNITS = "usr/local/lib/systemd/system"


def script(root: Path, action: str, **places: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), action],
        env={"PATH": "/usr/bin:/bin", "DESTDIR": str(root), **places},
        capture_output=True,
        text=True,
        check=False,
    )


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def test_everything_is_staged_below_destdir(tmp_path: Path) -> None:
    assert script(tmp_path, "install").returncode == 0
    assert files(tmp_path) == {
        *(f"{UNITS}/{name}.service" for name in ("prefilld", "decoded", "kvpair-devices")),
        f"{UNITS}/prefilld.socket",
        f"{UNITS}/kvpair.target",
        "usr/local/lib/sysusers.d/kvpair.conf",
        "usr/local/lib/tmpfiles.d/kvpair.conf",
        "opt/kvpair/share/doc/kvpair/README.md",
        "usr/local/bin/kvpair",
        "etc/kvpair/kvpair.toml",
        "etc/kvpair/kvpair.env",
    }


@pytest.mark.parametrize("name", ["prefilld", "decoded"])
def test_a_unit_names_the_places_that_were_asked_for(tmp_path: Path, name: str) -> None:
    script(tmp_path, "install", PREFIX="/srv/kv", SYSCONFDIR="/usr/etc")
    unit = (tmp_path / UNITS / f"{name}.service").read_text()
    assert f"ExecStart=/srv/kv/bin/{name}\n" in unit
    assert "EnvironmentFile=-/usr/etc/kvpair/kvpair.env\n" in unit
    assert (tmp_path / "usr/local/bin/kvpair").readlink() == Path("/srv/kv/bin/kvpair")
    assert "/opt/kvpair" not in unit


def test_a_configuration_that_is_there_is_the_administrators(tmp_path: Path) -> None:
    """An upgrade must not undo it; units are ours, and drop-ins are for changing them."""
    script(tmp_path, "install")
    config, unit = tmp_path / "etc/kvpair/kvpair.toml", tmp_path / UNITS / "decoded.service"
    config.write_text("mine")
    unit.write_text("mine")
    assert script(tmp_path, "install").returncode == 0
    assert config.read_text() == "mine"
    assert unit.read_text() != "mine"


def test_uninstalling_leaves_the_configuration_and_what_is_not_ours(tmp_path: Path) -> None:
    script(tmp_path, "install")
    (tmp_path / "opt/kvpair/pyvenv.cfg").touch()
    link = tmp_path / "usr/local/bin/kvpair"
    link.unlink()
    link.write_text("another program")
    assert script(tmp_path, "uninstall").returncode == 0
    assert files(tmp_path) == {
        "etc/kvpair/kvpair.toml",
        "etc/kvpair/kvpair.env",
        "usr/local/bin/kvpair",
    }


def test_a_prefix_that_holds_no_environment_of_ours_is_not_removed(tmp_path: Path) -> None:
    """PREFIX=/usr would be a catastrophe."""
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/true").touch()
    script(tmp_path, "uninstall", PREFIX="/usr")
    assert files(tmp_path) == {"usr/bin/true"}


def test_anything_else_is_a_usage_error(tmp_path: Path) -> None:
    done = script(tmp_path, "reinstall")
    assert done.returncode == 2
    assert "install|uninstall" in done.stderr
