"""What a person does all day with the real pair: chats, and files of prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.pair import Pair, wait_until
from tests.support.typed_terminal import CTRL_D, ENTER, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KVPAIR = [sys.executable, "-c", "from shared.cli.main import main; main()"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, even_model: Path) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("p"), model=even_model) as running:
        yield running
        running.wait_settled()


def kvpair(pair: Pair, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVPAIR, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=pair.environ,
    )


def test_a_chat_in_a_pipe_tells_two_answers_and_their_price(pair: Pair) -> None:
    """The second question comes with the first one and its answer before it."""
    result = kvpair(pair, "chat", "--max-tokens=8", "--ignore-eos", text="hello\nagain\n")
    assert result.returncode == 0
    told = [line for line in result.stderr.splitlines() if "prompt tokens" in line]
    first, second = (int(line.split()[1]) for line in told)
    assert second > first + 8
    assert all("8 in the answer" in line and "tokens/s" in line for line in told)


def test_a_chat_in_a_terminal_answers(pair: Pair, tmp_path: Path) -> None:
    arguments = ["chat", "--max-tokens=8", "--ignore-eos"]
    with Terminal([*KVPAIR, *arguments], {**pair.environ, "HOME": str(tmp_path)}) as terminal:
        terminal.read_until("> ")
        terminal.type(f"hello{ENTER}")
        terminal.read_until("tokens/s")
        terminal.read_until("> ")
        terminal.type(f"/stats{ENTER}")
        terminal.read_until("1 answer, 8 tokens in all")
        terminal.read_until("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_a_file_of_prompts_is_answered_as_each_prompt_alone(pair: Pair, tmp_path: Path) -> None:
    """Forty requests, eight at a time, with penalties and seeds; one of the lines is broken."""
    bodies: list[object] = [
        {
            "prompt": [2 + (7 * number + place) % 250 for place in range(5 + number)],
            "sampling": {"temperature": 2.0, "seed": number, "repetition_penalty": 1.2},
        }
        for number in range(40)
    ]
    bodies[17] = {"prompt": [1], "sampling": {"top_k": -1}}
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    arguments = [f"--file={prompts}", f"--output={out}", "--max-tokens=6", "--ignore-eos"]
    result = kvpair(pair, "generate", *arguments)
    assert result.returncode == 1
    assert f"{prompts}: line 18: `sampling`" in result.stderr
    entries = {entry["line"]: entry for entry in map(json.loads, out.read_text().splitlines())}
    assert sorted(entries) == list(range(1, 41))
    assert entries.pop(18)["error"]["code"] == "broken-line"
    for number in (1, 20, 40):
        body = bodies[number - 1]
        assert isinstance(body, dict)
        alone = pair.client.generate(
            body["prompt"], max_tokens=6, ignore_eos=True, sampling=body["sampling"]
        )
        assert entries[number]["tokens"] == list(alone.ids)
    assert all(len(entry["tokens"]) == 6 for entry in entries.values())


def test_a_second_run_asks_only_what_failed(pair: Pair, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('"hello"\n{}\n')
    arguments = ["generate", f"--file={prompts}", f"--output={out}", "--max-tokens=3"]
    assert kvpair(pair, *arguments).returncode == 1
    accepted = pair.counter("prefilld", "kvpair_requests_accepted_total")
    assert "1 of 2 lines answered, 1 of them before" in kvpair(pair, *arguments).stderr
    assert pair.counter("prefilld", "kvpair_requests_accepted_total") == accepted


@pytest.mark.parametrize("num_shared", [0, 48])
def test_a_measurement_is_of_work_that_nobody_has_done_before(pair: Pair, num_shared: int) -> None:
    """But for the beginning that was asked for: three blocks, which the warm-up left behind."""
    result = kvpair(
        pair, "bench", "--json", "--requests=8", "--concurrency=4", "--warmup=1",
        "--prompt-tokens=60-90", "--answer-tokens=8", f"--shared-prefix={num_shared}",
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    assert (told["completed"], told["total_output_tokens"]) == (8, 64)
    assert told["total_cached_tokens"] == 8 * num_shared
    assert told["stages_ms"]["first_step"]["num"] == 8
    assert told["median_itl_ms"] > 0
    # All clocks are one: the first token is known before it comes, the second needs a step.
    assert 0 < told["median_gap_ms"] < told["median_e2el_ms"]
    assert told["median_ttft_ms"] >= told["stages_ms"]["prefill"]["median"] > 0


# --- while decoded dies --------------------------------------------------------------------------

LONG = ["--max-tokens=1000", "--ignore-eos"]
"""Long enough to be caught on the way."""


def kill_decoded_under(pair: Pair, process: subprocess.Popen[str], *, num_running: int) -> str:
    """Kill decoded once a command's requests run there; return what it told at its end."""
    with process:
        wait_until(
            lambda: pair.decoded_status()["sequences"]["running"] == num_running,
            what="the answers are under way",
        )
        pair.kill("decoded")
        pair.restart("decoded")
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output + errors


def start_kvpair(pair: Pair, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*KVPAIR, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=pair.environ,
    )


def test_a_chat_goes_on_behind_the_last_character_when_decoded_dies(pair: Pair) -> None:
    """And its next turn has the answer as it would have been."""
    text = "hello\nagain\n"
    undisturbed = kvpair(pair, "chat", *LONG, text=text).stdout
    process = start_kvpair(pair, "chat", *LONG)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(text)
    process.stdin.flush()
    begun = process.stdout.read(100)
    told = begun + kill_decoded_under(pair, process, num_running=1)
    assert told.startswith(undisturbed)
    assert "went away after 0 tokens" not in told
    assert told.count("resuming (attempt 1 of 3)") == 1


def test_a_file_of_prompts_is_answered_whole_when_decoded_dies(pair: Pair, tmp_path: Path) -> None:
    """No line fails, and none is another one."""
    prompts = tmp_path / "p.jsonl"
    bodies = [{"prompt": [5, 6 + number]} for number in range(6)]
    prompts.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    arguments = ["generate", f"--file={prompts}", "--concurrency=3", *LONG]
    kvpair(pair, *arguments, f"--output={tmp_path / 'undisturbed'}")
    process = start_kvpair(pair, *arguments, f"--output={tmp_path / 'disturbed'}")
    assert "6 of 6 lines answered" in kill_decoded_under(pair, process, num_running=3)
    undisturbed, disturbed = (
        {
            entry["line"]: entry["tokens"]
            for entry in map(json.loads, (tmp_path / name).read_text().splitlines())
        }
        for name in ("undisturbed", "disturbed")
    )
    assert disturbed == undisturbed
    assert sorted(disturbed) == [1, 2, 3, 4, 5, 6]
