"""The dialect of chat templates, and what the sandbox keeps from them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from shared.model.template_sandbox import OutputTooLargeError, compile_template, render_template

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<b>"}]


def render(
    source: str, messages: Sequence[Mapping[str, str]] = CHAT, max_characters: int = 1000
) -> str:
    return render_template(compile_template(source), messages, {"bos_token": "<s>"}, max_characters)


def test_messages_and_variables_are_seen() -> None:
    """That is all a template is given."""
    assert (
        render("{{ bos_token }}{{ messages[0].role }}{{ messages[0]['content'] }}") == "<s>userhi"
    )


def test_statements_leave_no_white_space_behind() -> None:
    """Templates are written for `trim_blocks` and `lstrip_blocks`; a stray newline is a token."""
    source = "{% for m in messages %}\n  {% if m %}\n{{ m.role }},\n  {% endif %}\n{% endfor %}"
    assert render(source) == "user,\nassistant,\n"


def test_nothing_is_escaped() -> None:
    """A prompt is no page of HTML, neither plainly nor through `tojson`."""
    assert render("{{ messages[1].content }}") == "<b>"
    assert render("{{ messages[1] | tojson }}") == '{"role": "assistant", "content": "<b>"}'
    assert render("{{ {'b': 'é', 'a': 1} | tojson(sort_keys=true) }}") == '{"a": 1, "b": "é"}'


def test_loops_can_be_left() -> None:
    """Templates use `break` and `continue`, which plain Jinja lacks."""
    source = "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}x{% endfor %}"
    assert render(source) == "x"


def test_a_template_can_refuse_a_conversation() -> None:
    """With its own words, which the user should read."""
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_can_tell_the_date() -> None:
    """Some models are told what day it is."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception.__globals__.json }}",
    ],
)
def test_the_sandbox_keeps_the_interpreter_and_the_conversation(source: str) -> None:
    """Neither Python's internals nor what was passed in can be reached."""
    with pytest.raises(SecurityError, match=r"unsafe|not safely callable"):
        render(source)


def test_output_past_the_bound_ends_the_render() -> None:
    """At the piece that passes it, not after the last."""
    source = "{% for i in range(100000) %}{{ '0123456789' }}{% endfor %}"
    with pytest.raises(OutputTooLargeError, match="the output is longer than 1000 characters"):
        render(source)


def test_a_tag_that_we_lack_is_named() -> None:
    """The operator can look it up."""
    with pytest.raises(jinja2.TemplateSyntaxError, match="unknown tag 'trans'"):
        compile_template("{% trans %}{% endtrans %}")


def test_the_tag_that_marks_answers_for_training_changes_nothing() -> None:
    """Templates of some newer models have it, and transformers renders what is inside."""
    source = "{% for m in messages %}{% generation %}{{ m.role }},{% endgeneration %}{% endfor %}"
    assert render(source) == "user,assistant,"
