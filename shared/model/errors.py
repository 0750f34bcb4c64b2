"""Errors of models and their files; each text is one line that names the fault.

KvpairError
├── ModelError                 78   the configured model cannot be used
│   ├── InvalidSpecError            a shape that contradicts itself or that we cannot run
│   ├── ModelFileError              a file that is missing, damaged, or of a kind we cannot run
│   ├── UnknownModelError           a name that the catalogue does not have, or not here yet
│   └── FetchError                  a catalogue model that could not be brought here
└── PromptError                1    one request's prompt cannot become tokens
    ├── ChatTemplateError           the template refuses it, or breaks its limits
    └── PromptTooLargeError         more text than is ever tokenised at once
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.errors import ExitCode, KvpairError

if TYPE_CHECKING:
    from pathlib import Path


class ModelError(KvpairError):
    """The configured model cannot be used."""

    exit_code = ExitCode.CONFIG


class InvalidSpecError(ModelError, ValueError):
    """A model's shape contradicts itself, or asks for what we cannot run.

    Attributes:
        field: The field of `ModelSpec` that is at fault.
    """

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(f"`{field}` {fault}")
        self.field = field


class ModelFileError(ModelError):
    """A model file is missing, damaged, or of a kind that we cannot run.

    Attributes:
        path: The file.
        fault: What is wrong with it.
    """

    def __init__(self, path: Path, fault: str, *, hint: str | None = None) -> None:
        super().__init__(f"{path}: {fault}", hint=hint)
        self.path, self.fault = path, fault


class UnknownModelError(ModelError):
    """A name is not in the catalogue, or its model was not fetched yet."""


class FetchError(ModelError):
    """A model of the catalogue could not be brought here.  What was there is untouched."""


class PromptError(KvpairError):
    """One request's prompt cannot become tokens; the model and every other request are fine."""


class ChatTemplateError(PromptError):
    """The model's chat template refuses a conversation, or breaks its limits."""


class PromptTooLargeError(PromptError, ValueError):
    """A prompt is longer than any text that is tokenised at once."""
