"""The sockets: their folder, who may open them, who answers, and whether both daemons fit."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protocol.client import Client
from protocol.errors import ProtocolError, RequestError, UnixSocketError
from protocol.unix import connect_unix, peer_credentials
from shared.cli.checks.finding import Finding, fail, from_error, ok, warn
from shared.config.paths import check_socket_directory
from shared.errors import KvpairError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ANSWER_TIMEOUT_S = 5.0
"""A daemon answers STATUS from its event loop, whatever its engine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a daemon said of itself, and what the kernel says of it."""

    status: Mapping[str, Any]
    pid: int
    """As this process sees it; 0 where it is in a PID namespace that is not seen from here."""


def check_folder(name: str, path: Path, group: str | None) -> Finding:
    """Look at the folder of a daemon's socket, and at the group that may open it.

    Args:
        name: The daemon's.
        path: Of its socket.
        group: Configured; None for none.
    """
    check = f"{name} folder"
    folder = path.parent
    try:
        check_socket_directory(folder)
        if group is not None:
            grp.getgrnam(group)
    except KvpairError as error:
        return from_error(check, error)
    except KeyError:
        return fail(
            check, f"there is no group {group} ({name}.group)", cure=f"groupadd --system {group}"
        )
    if not folder.exists():
        if os.access(folder.parent, os.W_OK | os.X_OK):
            return ok(check, f"{folder} will be made; open to {_members(group)}")
        return fail(
            check,
            f"{folder} is not there, and {folder.parent} may not be written",
            cure="choose another place with KVPAIR_SOCKET, or start the daemons as a service",
        )
    if not os.access(folder, os.X_OK):
        return fail(
            check,
            f"{folder} is closed to {_who_am_i()}; it belongs to {_owner_of(folder)}",
            cure=_join(folder),
        )
    info = folder.stat()
    opened_to = _group_name(info.st_gid) if info.st_mode & stat.S_IXGRP else None
    return ok(check, f"{folder} belongs to {_owner_of(folder)}; open to {_members(opened_to)}")


def check_daemon(name: str, path: Path) -> tuple[Finding, Answer | None]:
    """Ask a daemon how it is, as a client does.

    Returns:
        What was found, and the answer where there was one.
    """
    try:
        with connect_unix(str(path)) as sock:
            pid = peer_credentials(sock).pid
        status = Client(path, timeout_s=ANSWER_TIMEOUT_S).status()
    except UnixSocketError as error:
        if _is_refused(path):
            return fail(name, str(error), cure=_join(path)), None
        start = "kvpair up, or systemctl start prefilld decoded"
        if not path.exists():
            return ok(name, f"is not running (nothing at {path}); {start}"), None
        return warn(name, str(error), cure=start), None
    except (ProtocolError, RequestError) as error:
        return (
            fail(
                name,
                f"answers at {path}, but not as expected: {error}",
                cure="is it another version? restart it; kvpair logs says more",
            ),
            None,
        )
    return _judge(name, status), Answer(status=status, pid=pid)


def _judge(name: str, status: Mapping[str, Any]) -> Finding:
    state = status.get("state")
    text = f"is {state} (version {status.get('version')}, pid {status.get('pid')})"
    match state:
        case "serving":
            return ok(name, text)
        case "loading":
            return warn(name, text, cure="wait: a large model takes minutes")
        case "waiting-for-peer":
            other = "decoded" if name == "prefilld" else "prefilld"
            return warn(name, text, cure=f"start {other}; kvpair logs says why there is no link")
        case _:
            return warn(name, text, cure="it is being stopped; its successor will serve")


def check_pair(prefilld: Answer | None, decoded: Answer | None) -> list[Finding]:
    """Compare what both daemons say of themselves; nothing where one of them is away."""
    if prefilld is None or decoded is None:
        return []
    findings = []
    for key, cure in (
        ("version", "restart the older one"),
        ("fingerprint", "give both the same model, dtype and block size, and restart them"),
    ):
        ours, theirs = prefilld.status.get(key), decoded.status.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            findings.append(fail("pair", f"prefilld has {key} {ours}, decoded {theirs}", cure=cure))
    link = prefilld.status.get("link")
    if isinstance(link, dict) and link.get("state") == "open":
        findings.append(ok("link", f"open, by {link.get('access')}, {link.get('rtt_us')} µs"))
        findings += _check_namespaces(prefilld, decoded)
    return findings


def _check_namespaces(prefilld: Answer, decoded: Answer) -> list[Finding]:
    """Tell of daemons whose pids, as they see themselves, are not those that are seen here."""
    others = [
        name
        for name, answer in (("prefilld", prefilld), ("decoded", decoded))
        if answer.pid != answer.status.get("pid")
    ]
    if not others:
        return []
    return [
        warn(
            "PID namespaces",
            f"{' and '.join(others)} live{'s' if len(others) == 1 else ''} in another one than "
            "this command",
            cure="where they do not see each other's pid, a dead peer is only noticed by silence: "
            "let both share one (hostPID, or shareProcessNamespace)",
        )
    ]


def _is_refused(path: Path) -> bool:
    """Whether the kernel keeps us out, rather than nobody being there."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except PermissionError:
            return True
        except OSError:
            return False
    return False


def _join(path: Path) -> str:
    """Return what lets this user in, where a socket or its folder is closed."""
    for place in (path, path.parent):
        with suppress(OSError):  # what is in a closed folder cannot be looked at
            group = _group_name(place.stat().st_gid)
            return f"sudo usermod -aG {group} {_who_am_i()}, then log in again"
    return "ask its owner to let you in (prefilld.group names a group that may)"


def _members(group: str | None) -> str:
    return "its user and root only" if group is None else f"members of {group} as well"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"the group {gid}"


def _who_am_i() -> str:
    return _user_name(os.geteuid())


def _owner_of(path: Path) -> str:
    return _user_name(path.stat().st_uid)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
