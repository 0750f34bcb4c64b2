"""The errors: their texts, their codes, and what they can be caught as."""

from __future__ import annotations

import pytest

from protocol import errors as e


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            e.FrameTooLargeError(announced_bytes=9, limit_bytes=8),
            "a frame of 9 bytes exceeds the 8 that are taken here; "
            "send less, or raise the daemon's limits.max_request_bytes",
        ),
        (
            e.MalformedFrameError(reason="it is a list", body=b"\x90"),
            "a frame of 1 bytes is not one msgpack map: it is a list (it begins 90)",
        ),
        (
            e.UnexpectedMessageError(message="end", state="idle"),
            "end may not arrive in state idle",
        ),
        (
            e.StaleEpochError(received=b"\x01", current=b"\x02"),
            "pool epoch 01 is stale; the current one is 02",
        ),
        (
            e.LinkRefusedError(reason="host", field="boot_id", ours="a", theirs="b", cure="move"),
            "link refused (host): boot_id is 'a' here and 'b' there; move",
        ),
        (
            e.AddressInUseError(path="/s", pid=7),
            "process 7 listens on /s already; stop it, or use another path (KVPAIR_SOCKET)",
        ),
        (
            e.AddressInUseError(path="/s", pid=None),
            "another process listens on /s already; stop it, or use another path (KVPAIR_SOCKET)",
        ),
    ],
)
def test_texts_are_built_from_the_fields(error: Exception, text: str) -> None:
    """A user reads exactly this line."""
    assert str(error) == text


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (e.FrameTooLargeError, (e.RemoteProtocolError, ValueError)),
        (e.MalformedFrameError, (e.RemoteProtocolError, ValueError)),
        (e.InvalidMessageError, (e.RemoteProtocolError, ValueError)),
        (e.ConnectionLostError, (e.ProtocolError, ConnectionError)),
        (e.DeadlineError, (e.ProtocolError, TimeoutError)),
        (e.NoSuchSocketError, (e.UnixSocketError, FileNotFoundError)),
        (e.NotListeningError, (e.UnixSocketError, ConnectionRefusedError)),
        (e.ListenQueueFullError, (e.UnixSocketError, BlockingIOError)),
        (e.SocketForbiddenError, (e.UnixSocketError, PermissionError)),
        (e.UnixSocketError, (e.ProtocolError, OSError)),
    ],
)
def test_each_is_what_its_builtin_is(error: type[Exception], kinds: tuple[type, ...]) -> None:
    """Both `except OSError` and `except ProtocolError` find it."""
    for kind in kinds:
        assert issubclass(error, kind)


def test_a_code_without_a_meaning_is_refused() -> None:
    """Codes are an interface, so each has a sentence in CODES."""
    with pytest.raises(TypeError, match="'gibberish', which CODES does not explain"):
        type("GibberishError", (e.ProtocolError,), {"code": "gibberish"})


def test_a_code_is_used_once() -> None:
    """Two meanings of one code could not be told apart on the other side."""
    with pytest.raises(TypeError, match="uses the code 'stale-epoch' of StaleEpochError"):
        type("AgainError", (e.ProtocolError,), {"code": "stale-epoch"})


def test_a_request_error_keeps_what_the_frame_said() -> None:
    """Programs branch on the code and wait as long as they were told."""
    error = e.RequestError("busy", "later", retryable=True, retry_after_ms=250)
    assert (str(error), error.code, error.message) == ("later", "busy", "later")
    assert (error.retryable, error.retry_after_ms) == (True, 250)
