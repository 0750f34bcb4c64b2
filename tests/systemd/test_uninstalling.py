"""The service taken away again.  The last file of this folder by name: nothing runs after it."""

from __future__ import annotations

import pytest

from tests.support.machine import SOURCE, Machine

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(300)]

SERVICES = ("prefilld.service", "decoded.service")


def test_uninstalling_stops_the_service_and_leaves_configuration_and_cache(
    serving: Machine,
) -> None:
    serving.unmount_packages()
    serving.run("make", "-C", SOURCE, "uninstall-system")
    assert serving.ask("ls", "/opt/kvpair", "/usr/local/bin/kvpair").stdout == ""
    for unit in SERVICES:
        shown = serving.show(unit, "LoadState", "ActiveState")
        assert shown == {"LoadState": "not-found", "ActiveState": "inactive"}
    assert serving.run("ls", "/etc/kvpair") == "kvpair.env\nkvpair.toml"
