"""Compiles and renders a chat template in Jinja's sandbox.

The same dialect as `transformers` offers, since templates are written for that: whitespace
options, loop controls, the `generation` tag, `tojson` that escapes nothing, `raise_exception`,
`strftime_now`.

The sandbox keeps a template from Python's internals.  It does not bound its time or memory: that
is what `template_worker` is for, the only place where this should run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: marks what training learns; here only the inside."""

    tags = {"generation"}  # noqa: RUF012 - the library's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class OutputTooLargeError(ValueError):
    """A template wrote more than it may."""


def compile_template(source: str) -> jinja2.Template:
    """Compile a template.

    Raises:
        jinja2.TemplateSyntaxError: It is no Jinja, or uses a tag that we do not have.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationTag],
        # Prompts are text for a model, not a page for a browser.
        autoescape=False,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render_template(
    template: jinja2.Template,
    messages: Sequence[Mapping[str, str]],
    variables: Mapping[str, Any],
    max_characters: int,
) -> str:
    """Render a conversation.

    Raises:
        OutputTooLargeError: The output passed `max_characters`.
        Exception: Whatever the template's own code raises.
    """
    parts: list[str] = []
    num_characters = 0
    for part in template.generate(messages=messages, **variables):
        num_characters += len(part)
        if num_characters > max_characters:
            raise OutputTooLargeError(f"the output is longer than {max_characters} characters")
        parts.append(part)
    return "".join(parts)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    # Local time without a zone: what templates print is "today" where the user is.
    return datetime.now().strftime(form)  # noqa: DTZ005


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
