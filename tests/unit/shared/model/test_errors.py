"""The errors of models: one line each, and the exit code that goes with them."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ExitCode
from shared.model import errors


def test_a_file_error_names_the_file_the_fault_and_what_to_do() -> None:
    """All three are what a user needs, on one line."""
    error = errors.ModelFileError(Path("m.gguf"), "is truncated", hint="copy it again")
    assert str(error) == "m.gguf: is truncated; copy it again"
    assert (error.path, error.fault) == (Path("m.gguf"), "is truncated")


def test_a_spec_error_names_its_field() -> None:
    """The field is both in the text and an attribute."""
    error = errors.InvalidSpecError("head_dim", "is 3")
    assert str(error) == "`head_dim` is 3"
    assert error.field == "head_dim"


def test_an_unusable_model_is_a_fault_of_the_configuration() -> None:
    """The service manager must not restart a daemon whose model cannot be used."""
    assert {
        error.exit_code
        for error in (
            errors.ModelFileError,
            errors.InvalidSpecError,
            errors.UnknownModelError,
            errors.FetchError,
        )
    } == {ExitCode.CONFIG}


def test_an_unusable_prompt_fails_only_its_request() -> None:
    """A prompt says nothing about the configuration."""
    assert errors.ChatTemplateError.exit_code is ExitCode.FAILED
    assert errors.PromptTooLargeError.exit_code is ExitCode.FAILED
