"""The alert rules as Prometheus' own tool reads and plays them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.systemd

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "systemd" / "prometheus" / "kvpair-alerts.yml"


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prometheus' tool: this machine's, or else taken out of Debian's package, uninstalled."""
    if found := shutil.which("promtool"):
        return found
    folder = tmp_path_factory.mktemp("prometheus")
    try:
        subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, check=True, timeout=120)
        (package,) = folder.glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        pytest.fail(f"the alert rules need promtool; install Prometheus' package ({error})")
    return str(folder / "usr/bin/promtool")


def test_prometheus_takes_the_rules(promtool: str) -> None:
    subprocess.run([promtool, "check", "rules", RULES], check=True, timeout=60)


def test_alerts_fire_by_what_they_are_for(promtool: str) -> None:
    """`alerts.yml` plays a lost link, a stuck hand-off, restarts, a full pool, a long answer."""
    subprocess.run([promtool, "test", "rules", HERE / "alerts.yml"], check=True, timeout=60)
