"""The deadline of a silent connection."""

from __future__ import annotations

from shared.daemon.keepalive import Keepalive, Verdict


def test_silence_is_asked_about_and_then_condemned() -> None:
    keepalive = Keepalive(interval_s=2, timeout_s=10, now_s=100)
    verdicts = [keepalive.check(100 + second) for second in range(11)]
    assert [verdict is Verdict.SEND_PING for verdict in verdicts].count(True) == 4
    assert verdicts[1] is Verdict.FINE
    assert verdicts[-1] is Verdict.PEER_SILENT


def test_any_frame_is_a_sign_of_life() -> None:
    keepalive = Keepalive(interval_s=2, timeout_s=10, now_s=100)
    keepalive.heard(109)
    assert keepalive.check(110) is Verdict.FINE
    assert keepalive.check(118.9) is Verdict.SEND_PING
