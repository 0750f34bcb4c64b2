"""What PromQL expressions ask for: enough of a reader to hold them against a real scrape."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SELECTOR = re.compile(r"\b((?:kvpair|process)_[a-z0-9_]+)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_TEMPLATE_LABEL = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")

SCRAPER_LABELS = frozenset({"instance", "job", "le"})
"""Labels that the scraper adds, and that of a histogram's buckets."""


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric in an expression, with the matchers in its braces."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    """(label, operator, value)."""

    def values_of(self, label: str) -> set[str]:
        """Return the plain values that a label is compared with; patterns are taken apart."""
        return {
            value
            for name, _, text in self.matchers
            if name == label
            for value in text.split("|")
            if re.fullmatch(r"[\w-]+", value)
        }


def selectors(expression: str) -> list[Selector]:
    """Return every metric that an expression reads."""
    return [
        Selector(name, tuple(_MATCHER.findall(inside or "")))
        for name, inside in _SELECTOR.findall(expression)
    ]


def grouping_labels(expression: str) -> set[str]:
    """Return the labels by which an expression groups or joins."""
    groups = _GROUPING.findall(expression)
    return {label.strip() for group in groups for label in group.split(",") if label.strip()}


def template_labels(text: str) -> set[str]:
    """Return the labels that a legend or an annotation shows."""
    return set(_TEMPLATE_LABEL.findall(text)) - {"value"}
