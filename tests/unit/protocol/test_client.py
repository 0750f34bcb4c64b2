"""The blocking client against a scripted daemon on a real socket."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol import messages as m
from protocol.client import Client
from protocol.codec import encode_message
from protocol.errors import (
    ConnectionLostError,
    DeadlineError,
    ListenQueueFullError,
    NoSuchSocketError,
    RequestError,
    UnexpectedMessageError,
)
from protocol.listener import listen_unix
from protocol.resuming import Loss, ResumePolicy
from protocol.unix import connect_unix
from tests.unit.protocol.samples import RESUME, SAMPLES
from tests.unit.protocol.scripted import Conversation, ScriptedDaemon

ANSWER = [
    SAMPLES[m.Accepted],
    m.Tokens(index=0, ids=[1], text="a"),
    m.Tokens(index=1, ids=[2, 3], text="bc"),
    SAMPLES[m.End],
]


def answers(conversation: Conversation) -> None:
    assert isinstance(conversation.receive(), m.Generate)
    conversation.send(*ANSWER)


def vanishes(conversation: Conversation) -> None:
    conversation.receive()
    conversation.send(*ANSWER[:2])


def goes_on(conversation: Conversation) -> None:
    """Answer what `vanishes` left open, where the request says that it is that."""
    request = conversation.receive()
    assert isinstance(request, m.Generate)
    assert request.resume == m.Resume(
        attempt=1, seed=RESUME.seed, fingerprint=RESUME.fingerprint, ids=[1]
    )
    conversation.send(ANSWER[0], *ANSWER[2:])


RESTART_S = 0.2
"""How long nobody listens in these tests: a few of the client's first tries."""

NO_RESUMING = ResumePolicy(max_attempts=0)


def waits_for_the_client_to_leave(conversation: Conversation) -> None:
    conversation.receive()
    assert conversation.receive() is None


def test_a_stream_yields_every_event_and_ends(tmp_path: Path) -> None:
    """Then it stays ended, and may be closed again."""
    with ScriptedDaemon(tmp_path / "s", answers), Client(tmp_path / "s").stream("Why?") as stream:
        assert list(stream) == ANSWER
        assert list(stream) == []
        stream.cancel()
        stream.close()


def test_options_travel_as_they_are(tmp_path: Path) -> None:
    """What the caller says is what the daemon reads."""
    seen: list[m.Message | None] = []

    def script(conversation: Conversation) -> None:
        seen.append(conversation.receive())
        conversation.send(*ANSWER)

    with ScriptedDaemon(tmp_path / "s", script):
        Client(tmp_path / "s").generate(
            [1, 2],
            id="r",
            raw=True,
            max_tokens=5,
            sampling=m.Sampling(temperature=1.0, seed=3),
            stop=("x",),
            stop_ids=(4,),
            ignore_eos=True,
            stream=False,
        )
    assert seen == [
        m.Generate(
            prompt=[1, 2],
            id="r",
            raw=True,
            max_tokens=5,
            sampling=m.Sampling(temperature=1.0, seed=3),
            stop=["x"],
            stop_ids=[4],
            ignore_eos=True,
            stream=False,
        )
    ]


def test_generate_returns_the_whole_answer(tmp_path: Path) -> None:
    """Ids, text, reason, usage, timings, and the first token's time as the client saw it."""
    with ScriptedDaemon(tmp_path / "s", answers):
        answer = Client(tmp_path / "s").generate("Why?")
    assert (answer.ids, answer.text, answer.reason) == ((1, 2, 3), "abc", "stop")
    assert answer.usage.completion_tokens == 2
    assert answer.ttft_ms is not None
    assert answer.ttft_ms > 0


def test_the_questions_have_plain_answers(tmp_path: Path) -> None:
    """One connection each."""

    def script(conversation: Conversation) -> None:
        question = conversation.receive()
        replies = {m.Check: m.Checked, m.StatusRequest: m.Status, m.MetricsRequest: m.Metrics}
        conversation.send(SAMPLES[replies[type(question)]])  # type: ignore[index]

    client = Client(tmp_path / "s")
    with ScriptedDaemon(tmp_path / "s", script, script, script):
        assert client.check([1, 2, 3], max_tokens=64) == SAMPLES[m.Checked]
        assert client.status() == SAMPLES[m.Status].status  # type: ignore[attr-defined]
        assert client.metrics() == SAMPLES[m.Metrics].text  # type: ignore[attr-defined]


def test_cancel_ends_the_answer_early(tmp_path: Path) -> None:
    """The client goes on reading until END says `cancelled`."""

    def script(conversation: Conversation) -> None:
        conversation.receive()
        conversation.send(*ANSWER[:2])
        assert conversation.receive() == m.Cancel()
        end = SAMPLES[m.End]
        conversation.send(m.End(reason="cancelled", usage=end.usage, timings_ms=end.timings_ms))  # type: ignore[attr-defined]

    with ScriptedDaemon(tmp_path / "s", script), Client(tmp_path / "s").stream("Why?") as stream:
        assert [next(stream), next(stream)] == ANSWER[:2]
        stream.cancel()
        (end,) = stream
    assert isinstance(end, m.End)
    assert end.reason == "cancelled"


def test_an_answer_that_was_cancelled_is_not_resumed(tmp_path: Path) -> None:
    """Its daemon died over the CANCEL; nobody wants the rest from another one."""
    with (
        ScriptedDaemon(tmp_path / "s", vanishes),
        Client(tmp_path / "s").stream("Why?") as stream,
    ):
        assert [next(stream), next(stream)] == ANSWER[:2]
        stream.cancel()
        with pytest.raises(ConnectionLostError, match="tokens delivered: 1"):
            next(stream)
        assert list(stream) == []


def test_a_cancel_ends_the_wait_for_a_daemon(tmp_path: Path) -> None:
    """Ctrl-C while no daemon is there: the loss is told at once, not a minute later."""
    daemon = ScriptedDaemon(tmp_path / "s", vanishes)
    policy = ResumePolicy(on_loss=lambda _: threading.Timer(0.1, stream.cancel).start())
    with daemon, Client(tmp_path / "s", resume_policy=policy).stream("Why?") as stream:
        assert [next(stream), next(stream)] == ANSWER[:2]
        daemon.close()
        with pytest.raises(ConnectionLostError, match="delivered: 1; it was cancelled"):
            next(stream)


def test_closing_early_is_a_cancel(tmp_path: Path) -> None:
    """The daemon sees the connection end."""
    with ScriptedDaemon(tmp_path / "s", waits_for_the_client_to_leave):
        Client(tmp_path / "s").stream("Why?").close()


def test_an_error_frame_is_raised_and_closes(tmp_path: Path) -> None:
    """With the code that programs branch on."""

    def script(conversation: Conversation) -> None:
        conversation.receive()
        conversation.send(SAMPLES[m.Error])

    with (
        ScriptedDaemon(tmp_path / "s", script),
        pytest.raises(RequestError, match="come back later") as caught,
    ):
        Client(tmp_path / "s").generate("Why?")
    assert caught.value.code == "busy"


def test_a_daemon_that_hangs_up_on_a_huge_request_is_heard_all_the_same(tmp_path: Path) -> None:
    """Writing fails with EPIPE, but the reason lies in the receive queue."""

    def script(conversation: Conversation) -> None:
        conversation.raw.recv(10)
        conversation.send(m.Error(code="frame-too-large", message="too big", retryable=False))

    with (
        ScriptedDaemon(tmp_path / "s", script),
        pytest.raises(RequestError, match="too big"),
    ):
        Client(tmp_path / "s").generate("x" * 3_000_000)


def resets(conversation: Conversation) -> None:
    """Close on unread bytes: the kernel tells the client ECONNRESET instead of EOF."""
    conversation.raw.recv(1)


def test_a_reset_is_a_lost_connection(tmp_path: Path) -> None:
    """A daemon that was killed with our request unread has gone, like any other."""
    with (
        ScriptedDaemon(tmp_path / "s", resets),
        pytest.raises(ConnectionLostError, match="tokens delivered: 0"),
    ):
        Client(tmp_path / "s", resume_policy=NO_RESUMING).generate("Why?")


def test_a_cut_answer_is_told_and_can_be_resumed_by_the_caller(tmp_path: Path) -> None:
    """What the error carries is what the next request needs."""
    client = Client(tmp_path / "s", resume_policy=NO_RESUMING)
    with ScriptedDaemon(tmp_path / "s", vanishes, goes_on):
        with pytest.raises(ConnectionLostError, match="tokens delivered: 1") as caught:
            client.generate("Why?")
        answer = client.generate("Why?", resume=caught.value.resume)
    assert answer.ids == (2, 3)


def test_a_cut_answer_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """The same events as those of an answer in one piece, and the loss told beside them."""
    losses: list[Loss] = []
    client = Client(tmp_path / "s", resume_policy=ResumePolicy(on_loss=losses.append))
    with (
        ScriptedDaemon(tmp_path / "s", vanishes, goes_on),
        client.stream("Why?") as stream,
    ):
        assert list(stream) == ANSWER
    assert [(loss.attempt, loss.num_tokens) for loss in losses] == [(1, 1)]


def test_the_whole_answer_is_of_one_piece_however_often_it_broke_off(tmp_path: Path) -> None:
    """Its ids, text and length are those of all connections."""
    with ScriptedDaemon(tmp_path / "s", resets, vanishes, goes_on):
        answer = Client(tmp_path / "s").generate("Why?")
    assert (answer.ids, answer.text, answer.reason) == ((1, 2, 3), "abc", "stop")


@pytest.mark.parametrize("leaves_a_socket", [True, False])
def test_a_daemon_that_is_started_again_is_found_again(
    tmp_path: Path, *, leaves_a_socket: bool
) -> None:
    """Meanwhile there is nobody behind the socket, or not even a socket."""
    path, daemons = tmp_path / "s", ExitStack()
    first = daemons.enter_context(ScriptedDaemon(path, vanishes))
    restart = threading.Timer(
        RESTART_S, lambda: daemons.enter_context(ScriptedDaemon(path, goes_on))
    )

    def on_loss(_loss: Loss) -> None:
        first.close()
        if leaves_a_socket:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        restart.start()

    with daemons:
        answer = Client(path, resume_policy=ResumePolicy(on_loss=on_loss)).generate("Why?")
        restart.join()
    assert answer.ids == (1, 2, 3)


def test_a_silent_daemon_is_not_waited_for_beyond_the_deadline(tmp_path: Path) -> None:
    """Every wait ends."""
    client = Client(tmp_path / "s", timeout_s=0.05)
    with (
        ScriptedDaemon(tmp_path / "s", waits_for_the_client_to_leave),
        pytest.raises(DeadlineError, match=r"the daemon was silent for 0\.05 s"),
    ):
        client.generate("Why?")


def test_dripping_bytes_do_not_extend_the_deadline(tmp_path: Path) -> None:
    """It bounds the time between messages, not between bytes."""

    def script(conversation: Conversation) -> None:
        conversation.receive()
        frame = encode_message(m.Accepted(**{**_fields(SAMPLES[m.Accepted]), "id": "x" * 64}))
        conversation.raw.settimeout(0.01)
        for byte in frame[:-1]:
            conversation.raw.sendall(bytes([byte]))
            try:
                if not conversation.raw.recv(1):
                    return
            except TimeoutError:
                continue
        raise AssertionError("the client waited for the whole frame")

    client = Client(tmp_path / "s", timeout_s=0.1)
    with (
        ScriptedDaemon(tmp_path / "s", script),
        pytest.raises(DeadlineError, match="silent"),
    ):
        client.generate("Why?")


def _fields(message: m.Message) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_daemon_that_breaks_the_rules_is_not_believed(tmp_path: Path) -> None:
    """TOKENS before ACCEPTED is no answer."""

    def script(conversation: Conversation) -> None:
        conversation.receive()
        conversation.raw.sendall(encode_message(SAMPLES[m.Tokens]))

    with (
        ScriptedDaemon(tmp_path / "s", script),
        pytest.raises(UnexpectedMessageError, match="tokens may not arrive in state judging"),
    ):
        Client(tmp_path / "s").generate("Why?")


def test_no_daemon_is_told_as_such(tmp_path: Path) -> None:
    """The transport's own error comes through."""
    with pytest.raises(NoSuchSocketError, match="start the daemons"):
        Client(tmp_path / "s").status()


def test_a_full_queue_of_connections_is_tried_until_the_deadline(tmp_path: Path) -> None:
    """A busy moment is ridden out, a stuck daemon is not waited for for ever."""
    with (
        listen_unix(tmp_path / "s", backlog=0),
        connect_unix(tmp_path / "s"),
        pytest.raises(ListenQueueFullError, match="try again"),
    ):
        Client(tmp_path / "s", connect_timeout_s=0.05).status()


def test_a_wrong_request_never_reaches_a_daemon(tmp_path: Path) -> None:
    """There is not even one here."""
    with pytest.raises(RequestError, match="max_tokens"):
        Client(tmp_path / "s").generate("Why?", max_tokens=0)


def test_the_client_is_quick_to_import() -> None:
    """The command line pays for every import, so the heavy ones stay out."""
    program = (
        "import sys, protocol.client, protocol.sockets, protocol.listener;"
        "print(sorted({'asyncio', 'torch', 'numpy', 'uvloop', 'structlog'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"[]\n"
