"""The pair over Hugging Face directories: answers, hostile templates, broken folders."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.client import Client
from protocol.errors import RequestError
from protocol.messages import ChatMessage
from shared.errors import ExitCode
from tests.support.pair import DAEMONS, Pair
from tests.support.tiny_hub import write_hub_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NORM = "model.norm.weight"
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

    def check_serves() -> None:
        answer = pair.client.generate(PROMPT, max_tokens=4, ignore_eos=True)
        assert len(answer.ids) == 4

    with Pair(tmp_path, model=tmp_path / "m") as pair, ThreadPoolExecutor(1) as other:
        check_serves()
        hostile = other.submit(Client(pair.socket, timeout_s=60).generate, "hello", max_tokens=4)
        check_serves()
        with pytest.raises(RequestError, match="the model's chat template") as caught:
            hostile.result(timeout=60)
        assert caught.value.code == "invalid-request"
        check_serves()


def lack_a_shard(folder: Path) -> str:
    missing = sorted(folder.glob("model-*.safetensors"))[-1]
    missing.unlink()
    return f"lacks the shard '{missing.name}'"


def have_a_wrong_shape(folder: Path) -> str:
    rewrite_weight(folder, torch.zeros(63))
    return f"has '{NORM}' of shape [63], where config.json asks for [64]"


def have_another_type(folder: Path) -> str:
    rewrite_weight(folder, torch.zeros(64, dtype=torch.int8))
    return f"stores '{NORM}' as I8"


def rewrite_weight(folder: Path, weight: torch.Tensor) -> None:
    """Put another tensor in the place of one."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][NORM]
    save_file({**load_file(shard), NORM: weight}, shard)


@pytest.mark.parametrize("damage", [lack_a_shard, have_a_wrong_shape, have_another_type])
def test_a_directory_that_is_not_right_ends_the_daemon_with_what_is_wrong(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    """In one line, with the exit code for a wrong configuration, before a socket is there."""
    folder = tmp_path / "m"
    write_hub_model(folder, max_shard_size="100KB")
    fault = damage(folder)
    for daemon in DAEMONS:
        ended = subprocess.run(
            [sys.executable, "-m", daemon, "--model", str(folder), "--log-format=json"],
            env=Pair(tmp_path, model=folder).environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == ExitCode.CONFIG
        assert fault in ended.stderr
        assert not (tmp_path / f"{daemon}.sock").exists()
