"""From argv and EMBEDSERVE_* variables to a Config, and from a mistake to one line on stderr.

Knows the command line only: nothing is served here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields

import pytest

from embedserve import __version__, cli
from embedserve.config import Config
from embedserve.errors import StartError

# Of each setting: two values as they are typed, and what they are in the Config.
TYPED: dict[str, list[tuple[str, object]]] = {
    "model": [("org/model", "org/model"), ("/a/folder", "/a/folder")],
    "revision": [("main", "main"), ("v2", "v2")],
    "host": [("0.0.0.0", "0.0.0.0"), ("::1", "::1")],
    "http_port": [("9000", 9000), ("0", 0)],
    "grpc_port": [("9001", 9001), ("0", 0)],
    "frontends": [("3", 3), ("auto", None)],
    "device": [("cpu", "cpu"), ("auto", "auto")],
    "dtype": [("float32", "float32"), ("bfloat16", "bfloat16")],
    "load_format": [("dummy", "dummy"), ("auto", "auto")],
    "backend": [("native", "native"), ("sentence-transformers", "sentence-transformers")],
    "threads": [("2", 2), ("auto", None)],
    "forwards": [("2", 2), ("auto", None)],
    "served_model_name": [("one", ("one",)), ("two", ("two",))],
    "max_batch_tokens": [("512", 512), ("auto", None)],
    "max_batch_ms": [("12.5", 12.5), ("auto", None)],
    "max_queued_tokens": [("1000", 1000), ("auto", None)],
    "max_input_tokens": [("128", 128), ("auto", None)],
    "max_inputs": [("16", 16), ("17", 17)],
    "max_body_mb": [("0.5", 0.5), ("8", 8.0)],
    "request_timeout_s": [("1.5", 1.5), ("2", 2.0)],
    "drain_s": [("0", 0.0), ("7.5", 7.5)],
    "stuck_after_s": [("10", 10.0), ("11", 11.0)],
    "auto_truncate": [("true", True), ("false", False)],
    "token_ids": [("model", "model"), ("refuse", "refuse")],
    "log_format": [("json", "json"), ("text", "text")],
}
NAMES = [item.name for item in fields(Config)]


def flag_of(name: str, typed: str) -> list[str]:
    if name == "model":
        return [typed]
    if name == "auto_truncate":
        return ["--auto-truncate" if typed == "true" else "--no-auto-truncate"]
    return ["--" + name.replace("_", "-"), typed]


def variable_of(name: str) -> str:
    return "EMBEDSERVE_" + name.upper()


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What would have been served."""
    served: list[Config] = []

    def serve(config: Config) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr(cli, "_serve", serve)
    return served


def status_of(argv: Sequence[str], environ: Mapping[str, str] = {}) -> int:
    try:
        return cli.run(argv, environ)
    except SystemExit as end:
        return end.code


def assert_one_line(capsys: pytest.CaptureFixture[str], *says: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("embedserve")
    for text in says:
        assert text in line


# Where a value comes from


def test_every_setting_is_tried_here() -> None:
    assert list(TYPED) == NAMES


def test_nothing_given_is_all_defaults(configs: list[Config]) -> None:
    assert status_of(["serve"]) == 0
    assert configs == [Config()]


@pytest.mark.parametrize("name", NAMES)
def test_setting_is_read_from_its_flag(name: str, configs: list[Config]) -> None:
    for typed, _ in TYPED[name]:
        assert status_of(["serve", *flag_of(name, typed)]) == 0
    assert [getattr(config, name) for config in configs] == [value for _, value in TYPED[name]]


@pytest.mark.parametrize("name", NAMES)
def test_setting_is_read_from_its_variable(name: str, configs: list[Config]) -> None:
    for typed, _ in TYPED[name]:
        assert status_of(["serve"], {variable_of(name): typed}) == 0
    assert [getattr(config, name) for config in configs] == [value for _, value in TYPED[name]]


@pytest.mark.parametrize("name", NAMES)
def test_flag_wins_over_variable(name: str, configs: list[Config]) -> None:
    for (typed, value), (other, _) in (TYPED[name], TYPED[name][::-1]):
        assert status_of(["serve", *flag_of(name, typed)], {variable_of(name): other}) == 0
        assert getattr(configs.pop(), name) == value


@pytest.mark.parametrize("name", NAMES)
def test_empty_variable_is_no_value(name: str, configs: list[Config]) -> None:
    assert status_of(["serve"], {variable_of(name): ""}) == 0
    assert configs == [Config()]


def test_settings_come_from_both_at_once(configs: list[Config]) -> None:
    argv = ["serve", "org/model", "--http-port", "9000", "--auto-truncate"]
    assert status_of(argv, {"EMBEDSERVE_GRPC_PORT": "9001", "EMBEDSERVE_MODEL": "ignored", "PATH": "/bin"}) == 0
    assert configs == [Config(model="org/model", http_port=9000, grpc_port=9001, auto_truncate=True)]


@pytest.mark.parametrize("typed", ["a b", "a,b", "a, b", " a  b "])
def test_several_names_may_be_given(typed: str, configs: list[Config]) -> None:
    assert status_of(["serve", "--served-model-name", "a", "b"]) == 0
    assert status_of(["serve"], {"EMBEDSERVE_SERVED_MODEL_NAME": typed}) == 0
    assert [config.served_model_name for config in configs] == [("a", "b")] * 2


@pytest.mark.parametrize(
    ("typed", "value"),
    [("1", True), ("TRUE", True), ("yes", True), ("on", True), ("0", False), ("False", False), ("no", False)],
)
def test_switch_is_read_from_any_usual_word(typed: str, value: bool, configs: list[Config]) -> None:
    assert status_of(["serve"], {"EMBEDSERVE_AUTO_TRUNCATE": typed}) == 0
    assert configs[0].auto_truncate is value


# Mistakes

BAD = [
    ("http_port", "abc"),
    ("http_port", "80.5"),
    ("grpc_port", "65536"),
    ("http_port", "-1"),
    ("frontends", "0"),
    ("frontends", "many"),
    ("device", "tpu"),
    ("dtype", "int8"),
    ("max_batch_ms", "fast"),
    ("max_batch_ms", "nan"),
    ("max_body_mb", "inf"),
    ("max_inputs", "auto"),
    ("max_batch_tokens", "1e3"),
    ("token_ids", "yes"),
    ("log_format", "xml"),
]


@pytest.mark.parametrize(("name", "typed"), BAD)
def test_bad_flag_is_one_line_that_names_it(
    name: str, typed: str, configs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["serve", "--" + name.replace("_", "-") + "=" + typed]) == 2
    assert_one_line(capsys, name.replace("_", "-").removeprefix("http-").removeprefix("grpc-"), typed)
    assert configs == []


@pytest.mark.parametrize(("name", "typed"), [*BAD, ("auto_truncate", "perhaps")])
def test_bad_variable_is_one_line(
    name: str, typed: str, configs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["serve"], {variable_of(name): typed}) == 2
    assert_one_line(capsys, typed)
    assert configs == []


@pytest.mark.parametrize(
    ("variable", "typed", "allowed"),
    [
        ("EMBEDSERVE_HTTP_PORT", "abc", "int"),
        ("EMBEDSERVE_MAX_BATCH_MS", "fast", "float"),
        ("EMBEDSERVE_AUTO_TRUNCATE", "perhaps", "true or false"),
    ],
)
def test_variable_of_a_wrong_type_is_named_with_what_it_takes(
    variable: str, typed: str, allowed: str, configs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["serve"], {variable: typed}) == 2
    assert_one_line(capsys, variable, repr(typed), allowed)


def test_bad_variable_does_not_matter_where_a_flag_is_given(configs: list[Config]) -> None:
    assert status_of(["serve", "--http-port", "9000"], {"EMBEDSERVE_HTTP_PORT": "abc"}) == 0
    assert configs[0].http_port == 9000


@pytest.mark.parametrize("argv", [[], ["serve", "--no-such-flag"], ["serve", "one", "two"], ["bake"]])
def test_unknown_command_or_flag_ends_with_status_2(
    argv: list[str], configs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err
    assert configs == []


def test_what_keeps_the_server_from_starting_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(config: Config) -> int:
        raise StartError("cannot listen on 127.0.0.1 port 8080")

    monkeypatch.setattr(cli, "_serve", serve)
    assert status_of(["serve"]) == 2
    assert_one_line(capsys, "cannot listen on 127.0.0.1 port 8080")


def test_missing_package_is_one_line_that_says_how_to_install_it() -> None:
    script = "import sys; sys.modules['msgspec'] = None; from embedserve import cli; sys.exit(cli.run(['serve'], {}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "msgspec" in line
    assert "pip install 'embedserve[server]'" in line


# What it says of itself


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["--version"]) == 0
    assert capsys.readouterr().out == f"embedserve {__version__}\n"


def test_help_lists_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["serve", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    for item in fields(Config):
        if item.name != "model":
            assert "--" + item.name.replace("_", "-") in help_text
        assert item.metadata["help"].replace(" ", "") in help_text.replace(" ", "")  # it breaks lines at hyphens too
    assert "(default: 8080)" in help_text
    assert "(default: auto)" in help_text
    assert "EMBEDSERVE_" in help_text


def test_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "embedserve", "serve"],
        env=os.environ | {"EMBEDSERVE_DEVICE": "tpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("embedserve: --device is 'tpu'; it must be one of auto, cpu")
