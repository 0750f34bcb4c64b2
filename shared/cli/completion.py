"""`kvpair completion`: the script that lets a shell complete what is typed."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM = "kvpair"

VARIABLE = "_KVPAIR_COMPLETE"
"""By which the script asks; the name is click's to choose, from the program's."""

BASH_OFFERS = "COMPREPLY+=($value)"
"""Where click's script for bash takes up what is offered."""

BASH_OFFERS_KEYS = f"""{BASH_OFFERS}
            [[ $value == *= ]] && compopt -o nospace"""
"""The same, and no space behind a `section.key=` whose value is still to be typed."""


@click.command(no_args_is_help=True)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes commands, flags and values in a shell.

    bash: eval "$(kvpair completion bash)", in ~/.bashrc

    zsh: eval "$(kvpair completion zsh)", in ~/.zshrc

    fish: kvpair completion fish | source, in config.fish

    An administrator puts it where the shell looks for all users, and spares each shell the start.
    """
    from shared.cli.program import cli  # noqa: PLC0415  it imports this module

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the three of them"
    script = kind(cli, {}, PROGRAM, VARIABLE).source()
    click.echo(script.replace(BASH_OFFERS, BASH_OFFERS_KEYS) if shell == "bash" else script)
