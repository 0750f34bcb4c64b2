"""Every configured value at its bounds, from a file and from text: made from the schema itself."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import inspect

from shared.config.schema import SECTIONS
from shared.config.sources import KEYS, Setting
from shared.config.values import check_setting
from shared.errors import ConfigError
from tests.support.wrong_values import example, plain, wrong_values

TYPES = {
    f"{section}.{field.name}": inspect.type_info(field.type)
    for section, struct in SECTIONS.items()
    for field in msgspec.structs.fields(struct)
}

NOT_TEXT = "\udcff"
"""What a byte that is no UTF-8 becomes on the command line and in the environment."""


def kind_of(key: str) -> inspect.Type:
    """Return a key's type, without the nothing that it may be."""
    info = plain(TYPES[key])
    if isinstance(info, inspect.UnionType):
        (info,) = (plain(kind) for kind in info.types if not isinstance(kind, inspect.NoneType))
    return info


def wrong_texts(key: str) -> list[str]:
    """Return what no flag and no variable may say for a key."""
    match kind_of(key):
        case inspect.StrType(pattern=pattern):
            return ["", NOT_TEXT, *(["cuda:", "tpu", "cpu\n"] if pattern else [])]
        case inspect.BoolType():
            return ["", "maybe", "2"]
        case inspect.LiteralType():
            return ["", "none of them"]
        case kind:
            numbers = [value for _, value in wrong_values(kind) if type(value) in {int, float}]
            return ["", "x", "nan", "inf", "1e999", *map(str, numbers)]


@pytest.mark.parametrize("key", KEYS)
def test_what_a_key_does_not_admit_is_refused_from_a_file(key: str) -> None:
    """The message names key, value and file, and says what is allowed."""
    for _, value in wrong_values(TYPES[key]):
        setting = Setting(key=key, value=value, origin="file /etc/x.toml", is_text=False)
        assert_refused(setting)


@pytest.mark.parametrize("key", KEYS)
def test_what_a_key_does_not_admit_is_refused_as_text(key: str) -> None:
    """A flag and a variable know no types; what they say is read as the key's."""
    for value in wrong_texts(key):
        assert_refused(Setting(key=key, value=value, origin="flag --set", is_text=True))


@pytest.mark.parametrize("key", KEYS)
def test_the_bounds_themselves_are_taken(key: str) -> None:
    """And mean the same from a file and as text."""
    kind = kind_of(key)
    edges = [kind.ge, kind.le] if isinstance(kind, inspect.IntType | inspect.FloatType) else []
    for value in [example(kind), *(edge for edge in edges if edge is not None)]:
        written = Setting(key=key, value=value, origin="file x", is_text=False)
        said = Setting(key=key, value=str(value).lower(), origin="flag --set", is_text=True)
        assert check_setting(written) == check_setting(said) == value


def assert_refused(setting: Setting) -> None:
    """Show that a setting is refused in one line that says all there is to know."""
    with pytest.raises(ConfigError, match=r"\S") as refused:
        check_setting(setting)
    said = str(refused.value)
    assert said.startswith(f"{setting.key} = "), setting
    assert setting.origin in said
    assert "expected " in said or "is not UTF-8" in said
    assert "\n" not in said
