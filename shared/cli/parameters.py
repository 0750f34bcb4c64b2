"""Kinds of flags whose values click alone would let through, to fail later in a traceback."""

from __future__ import annotations

import math

import click


class Number(click.FloatRange):
    """A number in a range.  No range keeps NaN out, and an open one lets the infinite in."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number, or end with a usage error."""
        number = float(super().convert(value, param, ctx))  # type: ignore[arg-type]  # it takes any
        if not math.isfinite(number):
            self.fail(f"{number} is not a number that can be used.", param, ctx)
        return number


class TokenSpan(click.ParamType):  # type: ignore[type-arg]  # older ones are no generic
    """A number of tokens in a range, or two of them with `-` between: from the one to the other."""

    name = "tokens"

    def __init__(self, low: int, high: int) -> None:
        self.min, self.max = low, high

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Return the lowest and the highest number, or end with a usage error."""
        low, is_range, high = str(value).partition("-")
        one = click.IntRange(self.min, self.max)
        least = int(one(low, param, ctx))
        most = int(one(high, param, ctx)) if is_range else least
        if most < least:
            self.fail(f"{value} goes down; put the smaller number first.", param, ctx)
        return least, most


class Text(click.types.StringParamType):
    """Text that the wire can carry: bytes that are no UTF-8 arrive as halves of characters."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the text, or end with a usage error."""
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self.fail(f"it is not UTF-8 (character {error.start + 1}).", param, ctx)
        return text


class FileName(click.Path):
    """A path.  An empty one, which a shell makes of an unset variable, would be this folder."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the path, or end with a usage error."""
        if value == "":
            self.fail("it is empty and names no file.", param, ctx)
        return str(value)


TEXT, FILE_NAME = Text(), FileName()

socket_option = click.option(
    "--socket", type=FILE_NAME, metavar="PATH", help="prefilld's socket; else KVPAIR_SOCKET."
)
"""`--socket`, the same for every command that asks a daemon."""
