"""Chat templates: equal to the reference, and held to their limits whatever they do."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.model.chat_template import ChatTemplate, RenderLimits
from shared.model.errors import ChatTemplateError
from shared.model.gguf_file import read_header
from shared.model.gguf_model import read_chat_template, read_special_tokens

REPOSITORY = Path(__file__).parents[4]
CHAT = [{"role": "user", "content": "hi"}]
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SHORT = RenderLimits(max_render_s=0.2)

Make = Callable[..., ChatTemplate]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make templates that are closed after the test."""
    made: list[ChatTemplate] = []

    def make(source: str, **options: object) -> ChatTemplate:
        made.append(ChatTemplate(source, **options))
        return made[-1]

    yield make
    for template in made:
        template.close()


def test_a_conversation_becomes_its_prompt(make: Make) -> None:
    """Messages, variables and the generation prompt are all that a template sees."""
    template = make(
        "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}",
        variables={"bos_token": "<s>"},
    )
    assert template.render(CHAT) == "<s>hi>"
    assert template.render(CHAT, add_generation_prompt=False) == "<s>hi"


def test_a_render_of_the_largest_request_is_within_the_limits(make: Make) -> None:
    """4 MiB of four-byte characters, the widest that a request can carry."""
    content = "\N{GRINNING FACE}" * (1 << 20)
    template = make("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    assert template.render([{"role": "user", "content": content}]) == "user" + content


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{{ 'a' * 2000000000 }}", "it needs more than 512 MiB of memory"),
        ("{{ 'a' * (messages|length * 2000000000) }}", "it needs more than 512 MiB of memory"),
        ("{{ '%2000000000d' % messages|length }}", "it needs more than 512 MiB of memory"),
        ("{{ 'a'.center(2000000000) }}", "it needs more than 512 MiB of memory"),
        ("{{ range(1000000)|list }}", "Range too big"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "longer than 16777216 char"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{{ raise_exception('roles\nmust alternate') }}", "fails: roles must alternate$"),
        ("{% nonsense %}", "unknown tag 'nonsense'"),
    ],
)
def test_a_template_that_goes_too_far_is_an_error_of_its_request(
    make: Make, source: str, fault: str
) -> None:
    """Every time, in one line; the daemon lives.  2 GB is harmless to try where no limit holds."""
    template = make(source)
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=fault) as caught:
            template.render(CHAT)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "source", "fault"),
    [
        (RenderLimits(max_characters=10), "{{ 'a' * 11 }}", "longer than 10 characters"),
        (
            RenderLimits(max_memory_bytes=200 << 20),
            "{% set a = 'a' * 250000000 %}",
            "than 200 MiB of mem",
        ),
    ],
)
def test_the_limits_are_the_caller_s(
    make: Make, limits: RenderLimits, source: str, fault: str
) -> None:
    """Both would pass under the usual ones."""
    with pytest.raises(ChatTemplateError, match=fault):
        make(source, limits=limits).render(CHAT)


@pytest.mark.parametrize("source", [NESTED, "{{ 9 ** (9 ** (messages|length * 8)) }}"])
def test_a_template_without_end_is_stopped(make: Make, source: str) -> None:
    """In a loop, or inside one single operation where no check of ours could run."""
    template = make(source, limits=SHORT)
    with pytest.raises(
        ChatTemplateError, match=r"was stopped: it took more than 0\.2 s or crashed"
    ):
        template.render(CHAT)


def test_a_template_that_cannot_be_compiled_in_time_is_stopped(make: Make) -> None:
    """Jinja computes constants when it compiles."""
    with pytest.raises(ChatTemplateError, match="was stopped"):
        make("{{ 9 ** (9 ** 8) }}", limits=SHORT).start()


def test_start_shows_a_template_that_is_none(make: Make) -> None:
    """At the daemon's start, not at the first request."""
    with pytest.raises(ChatTemplateError, match="fails: unexpected 'end of template'"):
        make("{% if").start()


def test_after_a_stop_the_next_render_works(make: Make) -> None:
    """One bad conversation costs the others a new process."""
    template = make(
        "{% if messages[0].content == 'bad' %}" + NESTED + "{% endif %}ok", limits=SHORT
    )
    for content, fails in (("good", False), ("bad", True), ("good", False)):
        messages = [{"role": "user", "content": content}]
        if fails:
            with pytest.raises(ChatTemplateError, match="was stopped"):
                template.render(messages)
        else:
            assert template.render(messages) == "ok"


def test_a_worker_that_was_killed_is_replaced(make: Make) -> None:
    """The kernel kills for memory; so may an operator."""
    template = make("{{ pid }}ok")
    template.start()
    for pid in _children():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ChatTemplateError, match="or crashed"):
        template.render(CHAT)
    assert template.render(CHAT) == "ok"


def test_no_worker_stays_behind(make: Make) -> None:
    """Neither after `close` nor when the template is forgotten."""
    before = _children()
    template = make("ok")
    template.start()
    assert len(_children() - before) == 1
    template.close()
    assert _children() == before
    forgotten = ChatTemplate("ok")
    forgotten.start()
    del forgotten
    gc.collect()
    assert _children() == before


@pytest.mark.model
def test_conversations_render_as_in_transformers(make: Make, smollm2_file: Path) -> None:
    """One and two turns, with and without a system message, with and without a prompt to go on."""
    from transformers.utils.chat_template_utils import render_jinja_template

    header = read_header(smollm2_file)
    source = read_chat_template(header)
    assert source is not None
    variables = read_special_tokens(header)
    template = make(source, variables=variables)
    for chat in _conversations():
        for add_generation_prompt in (True, False):
            rendered, _ = render_jinja_template(
                [chat],
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            ours = template.render(chat, add_generation_prompt=add_generation_prompt)
            assert ours == rendered[0]


def _conversations() -> list[list[dict[str, str]]]:
    """Return conversations of MT-Bench's turns where the traces are, of a few of ours elsewhere."""
    folder = Path(os.environ.get("KVPAIR_TRACES", REPOSITORY.parent / "shared" / "traces"))
    path = folder / "mt_bench_80.jsonl"
    if path.exists():
        turns = [json.loads(line)["turns"] for line in path.read_text().splitlines()]
    else:
        turns = [["What is the capital of France?", "And of\n Italy? "], ["  é<|im_end|>\n", ""]]
    chats = []
    for first, second in turns:
        user = {"role": "user", "content": first}
        answer = {"role": "assistant", "content": "So.\n"}
        chats.append([user])
        chats.append([user, answer, {"role": "user", "content": second}])
        chats.append([{"role": "system", "content": "Be brief."}, user])
    return chats


def _children() -> set[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()}
