"""`shared.config.options`: flags of the command line, for this program and for handing on."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from shared.config.options import ConfigFlags, config_options
from shared.errors import ConfigError


def parse(*arguments: str) -> ConfigFlags:
    @click.command
    @config_options
    def command(flags: ConfigFlags) -> ConfigFlags:
        return flags

    flags = command.main(list(arguments), standalone_mode=False)
    assert isinstance(flags, ConfigFlags)
    return flags


def test_shorthands_name_their_key_and_themselves_as_origin() -> None:
    flags = parse("--model", "/m.gguf", "--log-level", "debug", "--set", "pool.num_blocks=9")
    assert {(setting.key, setting.value, setting.origin) for setting in flags.settings} == {
        ("model.path", "/m.gguf", "flag --model"),
        ("log.level", "debug", "flag --log-level"),
        ("pool.num_blocks", "9", "flag --set"),
    }


def test_the_flags_can_be_handed_on() -> None:
    """`kvpair up` starts its daemons with the flags that it was given."""
    flags = parse("--config", "rel.toml", "--model", "m", "--set", "log.format=json")
    again = parse(*flags.arguments)
    assert again == flags
    assert again.config_file == Path("rel.toml").absolute()


def test_an_unknown_key_is_refused_while_parsing() -> None:
    with pytest.raises(ConfigError, match=r"--set: unknown key 'pol\.size'"):
        parse("--set", "pol.size=1")
