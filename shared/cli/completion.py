"""`kvpair completion`: the script that lets a shell complete what is typed."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM = "kvpair"

VARIABLE = "_KVPAIR_COMPLETE"
"""By which the script asks; the name is click's to choose, from the program's."""


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

    script = get_completion_class(shell)
    assert script is not None, "click knows the three of them"
    click.echo(script(cli, {}, PROGRAM, VARIABLE).source())
