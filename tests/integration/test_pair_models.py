"""The pair over Hugging Face directories: answers, hostile templates, broken folders."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from protocol.errors import RequestError
from protocol.messages import ChatMessage
from shared.errors import ExitCode
from tests.support.pair import Pair
from tests.support.tiny_hub import write_hub_model

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [3 + (29 * place) % 375 for place in range(70)]


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen2", "qwen3"])
def test_every_family_answers_as_transformers_does(tmp_path: Path, name: str) -> None:
    """Prompt, window and all, over the hand-over; greedy, token for token."""
    reference = write_hub_model(tmp_path / "m", name)
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
        )
    with Pair(tmp_path, model=tmp_path / "m", settings={"prefilld.token_budget": 32}) as pair:
        answer = pair.client.generate(PROMPT, max_tokens=24, ignore_eos=True)
        assert list(answer.ids) == output[0, len(PROMPT) :].tolist()
        chat = [ChatMessage(role="user", content="Why?")]
        assert pair.client.generate(chat, max_tokens=4).reason in ("stop", "length")
        pair.wait_settled()


@pytest.mark.parametrize(
    "body",
    [
        "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
    ],
    ids=["endless", "huge"],
)
def test_a_hostile_template_costs_its_request_and_nothing_else(tmp_path: Path, body: str) -> None:
    """Text that needs no template is answered before, meanwhile and after."""
    write_hub_model(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(body)
    with Pair(tmp_path, model=tmp_path / "m") as pair:
        with pytest.raises(RequestError, match="the model's chat template") as caught:
            pair.client.generate("hello", max_tokens=4)
        assert caught.value.code == "invalid-request"
        answer = pair.client.generate(PROMPT, max_tokens=4, ignore_eos=True)
        assert len(answer.ids) == 4


def test_a_directory_that_lacks_a_shard_ends_the_daemon_with_its_name(tmp_path: Path) -> None:
    """In one line, with the exit code for a wrong configuration, before a socket is there."""
    folder = tmp_path / "m"
    write_hub_model(folder, max_shard_size="100KB")
    missing = sorted(folder.glob("model-*.safetensors"))[-1]
    missing.unlink()
    for daemon in ("prefilld", "decoded"):
        ended = subprocess.run(
            [sys.executable, "-m", daemon, "--model", str(folder), "--log-format=json"],
            env=Pair(tmp_path, model=folder).environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == ExitCode.CONFIG
        assert f"lacks the shard '{missing.name}'" in ended.stderr
    shutil.rmtree(folder)
