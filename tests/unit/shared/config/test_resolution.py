"""`shared.config.resolve`: the order of the sources, whence each value came, and every refusal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shared.config import ResolvedConfig, resolve
from shared.config.schema import SECTIONS, Config
from shared.config.sources import KEYS, VARIABLES, parse_assignment
from shared.errors import ConfigError, UsageError

Resolve = Callable[..., ResolvedConfig]


@pytest.fixture
def resolved(tmp_path: Path) -> Resolve:
    """Resolve TOML text, variables and assignments, away from this machine's own files."""

    def run(
        *assignments: str, toml: str | None = None, num_cores: int = 4, **environ: str
    ) -> ResolvedConfig:
        file = None
        if toml is not None:
            file = tmp_path / "kvpair.toml"
            file.write_text(toml)
        return resolve(
            environ={"TMPDIR": str(tmp_path), **environ},
            flags=[parse_assignment(text) for text in assignments],
            config_file=file,
            num_cores=num_cores,
            system_file=tmp_path / "etc.toml",
        )

    return run


def test_a_later_source_wins_and_is_named(resolved: Resolve, tmp_path: Path) -> None:
    """Defaults < file < environment < flags, and a later flag over an earlier one."""
    toml = "[pool]\nnum_blocks = 3\nblock_size = 8\n[log]\nlevel = 'debug'\n"
    result = resolved(
        "log.level=warning",
        "log.level=error",
        toml=toml,
        KVPAIR_LOG_LEVEL="info",
        KVPAIR_POOL_BLOCK_SIZE="4",
    )
    assert (result.config.pool.num_blocks, result.config.pool.block_size) == (3, 4)
    assert result.config.log.level == "error"
    assert result.origins["pool.num_blocks"] == f"file {tmp_path / 'kvpair.toml'}"
    assert result.origins["pool.block_size"] == "env KVPAIR_POOL_BLOCK_SIZE"
    assert result.origins["log.level"] == "flag --set"
    assert result.origins["log.format"] == "default"


def test_every_key_has_a_value_an_origin_and_a_variable(resolved: Resolve) -> None:
    result = resolved()
    assert list(result.values()) == list(KEYS) == list(result.origins) == list(VARIABLES.values())
    assert set(result.origins.values()) == {"default"}


def test_every_section_of_the_schema_is_in_the_table() -> None:
    """A section that the table forgot could never be set."""
    fields = msgspec.structs.fields(Config)
    assert {field.name: field.type for field in fields} == SECTIONS


def test_the_system_file_is_read_where_it_exists(resolved: Resolve, tmp_path: Path) -> None:
    (tmp_path / "etc.toml").write_text("[pool]\nnum_blocks = 5\n")
    assert resolved().config.pool.num_blocks == 5
    assert resolved(toml="").config.pool.num_blocks == 1024, "another file was named"


def test_a_variable_may_name_the_file(resolved: Resolve, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[pool]\nnum_blocks = 6\n")
    assert resolved(KVPAIR_CONFIG=str(tmp_path / "mine.toml")).config.pool.num_blocks == 6


def test_text_becomes_the_type_of_its_key(resolved: Resolve) -> None:
    """The environment and the command line know only text."""
    config = resolved(
        "log.prompts=true", "link.quarantine_s=2", "decoded.link_uid=12", "model.path=a=b"
    ).config
    assert config.log.prompts is True
    assert config.link.quarantine_s == 2.0
    assert config.decoded.link_uid == 12
    assert config.model.path == "a=b"


def test_one_variable_places_both_sockets(resolved: Resolve, tmp_path: Path) -> None:
    """The second lies beside the first, unless it has a place of its own."""
    config = resolved(KVPAIR_SOCKET="/srv/a/p.sock").config
    assert (config.prefilld.socket, config.decoded.socket) == (
        "/srv/a/p.sock",
        "/srv/a/decoded.sock",
    )
    config = resolved(KVPAIR_SOCKET="/srv/a/p.sock", KVPAIR_DECODED_SOCKET="/d.sock").config
    assert (config.prefilld.socket, config.decoded.socket) == ("/srv/a/p.sock", "/d.sock")


def test_socket_paths_become_absolute(resolved: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon and a client may have different working directories."""
    monkeypatch.chdir("/")
    assert resolved("prefilld.socket=x/p.sock").config.prefilld.socket == "/x/p.sock"


def test_threads_left_open_are_half_the_cores(resolved: Resolve) -> None:
    assert resolved(num_cores=8).config.prefilld.threads == 4
    assert resolved(num_cores=1).config.decoded.threads == 1
    assert resolved("decoded.threads=3").config.decoded.threads == 3


def test_more_threads_than_cores_are_warned_about(resolved: Resolve) -> None:
    """Two daemons that each take all cores slow each other down many times over."""
    assert resolved().warnings == ()
    (warning,) = resolved("prefilld.threads=4").warnings
    assert warning.startswith("prefilld.threads + decoded.threads = 6 on 4 cores")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[pool", r"kvpair\.toml is not TOML: .*line 1|is not TOML"),
        ("answer = 42", r"'answer' stands outside a section"),
        ("[pol]\nx = 1", r"unknown section \[pol\]; did you mean 'pool'\?"),
        ("[pool]\nnum_blokcs = 1", r"unknown key 'num_blokcs' in \[pool\]; did you mean 'num_blo"),
        ("[log]\nzzz = 1", r"unknown key 'zzz' in \[log\]; known: level, format, prompts"),
        ("[pool]\nnum_blocks = '9'", r"pool\.num_blocks = '9' \(file .*a whole number from 2"),
        ("[pool]\nnum_blocks = true", r"pool\.num_blocks = True .* a whole number"),
        ("[pool]\nnum_blocks = -1", r"num_blocks = -1 .* 0, or a whole number from 2"),
        ("[pool]\nnum_blocks = 1", r"block 0 is reserved.*expected 0, or a whole number from 2"),
        ("[decoded]\nnum_blocks = 1", r"decoded\.num_blocks = 1 .* block 0 is reserved"),
        ("[pool]\nnum_blocks = 9.5", r"pool\.num_blocks = 9\.5"),
        ("[log]\nprompts = 1", r"log\.prompts = 1 .* expected true or false"),
        ("[log]\nlevel = 'loud'", r"'loud' .* one of 'debug', 'error', 'info', 'warning'"),
        ("[link]\nquarantine_s = nan", r"link\.quarantine_s = nan .* a number from 0"),
        ("[link]\nping_interval_s = 0", r"a number above 0 to 86400"),
        ("[limits]\ndrain_timeout_s = inf", r"limits\.drain_timeout_s = inf"),
        ("[limits]\ndrain_timeout_s = 1979-05-27", r"limits\.drain_timeout_s = .*date"),
        ("[decoded]\nlink_uid = -1", r"decoded\.link_uid = -1 .* a whole number from 0"),
        ("[model]\npath = ''", r"model\.path = '' .* a text that is not empty"),
        ("[pool]\naccess = 'push'", r"access = 'push' .* one of 'auto', 'direct', 'pull'"),
        ("[prefilld]\ndevice = 'cuda:'", r"device = 'cuda:' .* 'cpu', 'cuda', 'cuda:N', or"),
        ("[prefilld]\ndevice = 'gpu'", r"device = 'gpu' .* a GPU's UUID"),
        ("[prefilld]\ndevice = 'cuda:1'", r"decoded\.device = 'cpu' are of two kinds"),
        ("[decoded]\nmemory_fraction = 1.5", r"memory_fraction = 1\.5 .* a number from 0 to 1"),
        ("[link]\nping_timeout_s = 1", r"ping_timeout_s = 1 is not more than .*ping_interval_s"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(resolved: Resolve, toml: str, message: str) -> None:
    """One line that says what stands where, and what would be allowed."""
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(toml=toml)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the configuration .*: No such file"),
        (b"\xff\xfe", r"is not UTF-8 text \(byte 0\)"),
        (b"#" * (1 << 20) + b"\n", "is larger than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "kvpair.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        resolve(environ={}, config_file=file)


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*: Is a directory"):
        resolve(environ={}, config_file=tmp_path)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"KVPAIR_POOL_ACESS": "pull"},
            "unknown environment variable KVPAIR_POOL_ACESS; did you mean 'KVPAIR_POOL_ACCESS'",
        ),
        ({"KVPAIR_POOL_NUM_BLOCKS": "many"}, r"'many' \(env KVPAIR_POOL_NUM_BLOCKS\)"),
        ({"KVPAIR_SOCKET": "/" + "x" * 107}, r"\(env KVPAIR_SOCKET\) has 108 bytes.* at most 107"),
        ({"KVPAIR_PREFILLD_SOCKET": "/a", "KVPAIR_DECODED_SOCKET": "/a"}, "are both /a"),
        (
            {"KVPAIR_PREFILLD_METRICS": '"127.0.0.1:9464"'},
            "METRICS.* is not allowed; leave out the quotes, which only the file wants",
        ),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(
    resolved: Resolve, environ: dict[str, str], message: str
) -> None:
    """A misspelt variable that is ignored in silence costs somebody an afternoon."""
    with pytest.raises(ConfigError, match=message):
        resolved(**environ)


def test_a_socket_path_of_107_bytes_is_the_longest(resolved: Resolve) -> None:
    longest = "/" + "x" * 106
    assert resolved(f"prefilld.socket={longest}").config.prefilld.socket == longest


def test_a_huge_value_is_shown_in_part() -> None:
    with pytest.raises(ConfigError, match="…") as caught:
        resolve(environ={}, flags=[parse_assignment("pool.num_blocks=" + "9" * 10_000)])
    assert len(str(caught.value)) < 300


def test_an_assignment_needs_an_equals_sign_and_a_known_key() -> None:
    with pytest.raises(UsageError, match=r"--set pool\.num_blocks: expected section\.key=value"):
        parse_assignment("pool.num_blocks")
    with pytest.raises(ConfigError, match=r"unknown key 'pool\.num'"):
        parse_assignment("pool.num=1")


def test_decoded_s_socket_lies_beside_wherever_the_other_one_was_put() -> None:
    """Else a second pair would listen on the first one's socket."""
    flags = [parse_assignment("prefilld.socket=/srv/pair/p.sock")]
    resolved = resolve(environ={}, flags=flags)
    assert resolved.config.decoded.socket == "/srv/pair/decoded.sock"
    flags.append(parse_assignment("decoded.socket=/srv/other/d.sock"))
    assert resolve(environ={}, flags=flags).config.decoded.socket == "/srv/other/d.sock"


def test_a_system_file_in_a_closed_folder_is_told(tmp_path: Path) -> None:
    """As not being there it would be passed over, and the daemons run with other values."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    was_root = os.geteuid() == 0
    if was_root:  # whom no mode keeps out
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=r"cannot read .*closed/kvpair.toml: Permission den"):
            resolve(environ={}, num_cores=2, system_file=closed / "kvpair.toml")
    finally:
        if was_root:
            os.seteuid(0)
