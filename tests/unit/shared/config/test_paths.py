"""`shared.config.paths`: where the sockets are, and whose folder may be trusted."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

import pytest

from shared.config.paths import (
    beside,
    check_socket_directory,
    check_socket_path,
    client_socket,
    default_socket_directory,
    prepare_socket_directory,
)
from shared.errors import ConfigError, EnvironmentUnsupportedError


def test_the_machines_own_folder_goes_before_the_users(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7", "TMPDIR": "/tmp"}
    missing = tmp_path / "missing"
    assert default_socket_directory(environ, system_directory=tmp_path) == tmp_path
    assert default_socket_directory(environ, system_directory=missing) == Path("/run/user/7/kvpair")
    del environ["XDG_RUNTIME_DIR"]
    private = Path(f"/tmp/kvpair-{os.getuid()}")
    assert default_socket_directory(environ, system_directory=missing) == private
    assert default_socket_directory({}, system_directory=missing) == private


def test_a_missing_folder_is_made_private(tmp_path: Path) -> None:
    """Whoever can reach the socket can read answers, so nobody else can."""
    directory = tmp_path / "kvpair"
    before = os.umask(0)
    try:
        prepare_socket_directory(directory)
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o700
    prepare_socket_directory(directory)


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    """Its owner may have opened it to a group."""
    tmp_path.chmod(0o750)
    prepare_socket_directory(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("mode", "cure"),
    [
        (0o1777, "choose a folder of your own below it with KVPAIR_SOCKET"),  # as /tmp is
        (0o777, "`chmod o-w {folder}`, or choose another place with KVPAIR_SOCKET"),
    ],
)
def test_a_folder_that_everybody_may_write_is_refused(tmp_path: Path, mode: int, cure: str) -> None:
    """Anybody could put a socket of their own there and read our prompts."""
    tmp_path.chmod(mode)
    with pytest.raises(
        EnvironmentUnsupportedError, match=rf"written by everybody \(mode {mode:04o}\)"
    ) as refusal:
        check_socket_directory(tmp_path)
    assert refusal.value.hint == cure.format(folder=tmp_path)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """In a temporary directory anybody can put a link where our folder would be."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(EnvironmentUnsupportedError, match="link is not a folder"):
        prepare_socket_directory(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """Where anybody may put one, as in /tmp, that user may have waited for us."""
    tmp_path.chmod(0o1777)
    folder = tmp_path / "kvpair"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    with pytest.raises(EnvironmentUnsupportedError, match="belongs to the user with number 12345"):
        check_socket_directory(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_only_root_can_have_put_there_may_belong_to_anybody(tmp_path: Path) -> None:
    """/run/kvpair is the daemons' user's, and members of its group are to trust it."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "kvpair"
    folder.mkdir(mode=0o750)
    os.chown(folder, 12345, -1)
    check_socket_directory(folder)
    tmp_path.chmod(0o775)  # whoever is in root's group could have moved it
    with pytest.raises(EnvironmentUnsupportedError, match="belongs to the user with number 12345"):
        check_socket_directory(folder)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnsupportedError, match=r"cannot make .*/a/b: No such file"):
        prepare_socket_directory(tmp_path / "a" / "b")


def test_a_client_takes_the_flag_then_the_variable_then_the_default(tmp_path: Path) -> None:
    environ = {"KVPAIR_SOCKET": "/srv/p.sock", "TMPDIR": str(tmp_path)}
    assert client_socket(environ, chosen="/flag.sock") == Path("/flag.sock")
    assert client_socket(environ) == Path("/srv/p.sock")
    assert beside(client_socket(environ)) == Path("/srv/decoded.sock")
    del environ["KVPAIR_SOCKET"]
    assert client_socket(environ).name == "prefilld.sock"


def test_a_path_the_kernel_cannot_bind_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match=r"\(flag --socket\) has 108 bytes.*at most 107"):
        client_socket({}, chosen="/" + "é" * 53 + "x")
    with pytest.raises(ConfigError, match="holds a zero byte"):
        client_socket({}, chosen="/a\0b")


@pytest.mark.parametrize("folder", ["/", ".", "..", "/tmp/"])
def test_a_folder_is_no_socket(folder: str) -> None:
    """The slash of a path that a script put together would end in a traceback."""
    for chosen, environ in ((folder, {}), (None, {"KVPAIR_SOCKET": folder})):
        with pytest.raises(ConfigError, match=r"the socket path /.* is a folder; name a file"):
            client_socket(environ, chosen=chosen)
    assert beside(Path(folder)).name == "decoded.sock"


def test_a_path_that_cannot_be_told_is_refused() -> None:
    """STATUS says where decoded is, in UTF-8."""
    with pytest.raises(ConfigError, match="is not UTF-8"):
        client_socket({}, chosen="/a/\udcff")


def test_a_folder_for_a_group_lets_its_members_pass(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    prepare_socket_directory(tmp_path / "run", group=group)
    status = (tmp_path / "run").stat()
    assert stat.S_IMODE(status.st_mode) == 0o750
    assert status.st_gid == os.getgid()


def test_a_folder_for_a_group_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no group no-such-group"):
        prepare_socket_directory(tmp_path / "run", group="no-such-group")
    assert not (tmp_path / "run").exists()


def test_a_socket_behind_a_closed_folder_is_for_connect_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may not pass is told which group to join, and not how a check failed."""

    def is_closed(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", is_closed)  # root may pass everywhere
    check_socket_path(str(tmp_path / "prefilld.sock"), origin="a test")
