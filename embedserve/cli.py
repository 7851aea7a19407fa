"""The command line: argv and EMBEDSERVE_* variables to a Config, then the command. Imports nothing heavy.

Every flag --like-this is also EMBEDSERVE_LIKE_THIS; the flag wins.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn, get_args, get_type_hints

from embedserve import __version__
from embedserve.config import Config
from embedserve.errors import StartError

START_ERROR_STATUS = 2


def main() -> None:
    sys.exit(run(sys.argv[1:], os.environ))


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        config = read_config(arguments, environ)
        return _serve(config)
    except StartError as error:
        print(f"embedserve: {error}", file=sys.stderr)
        return START_ERROR_STATUS


def read_config(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """Flags over variables over defaults. Raises StartError."""
    values: dict[str, Any] = {}
    for item in fields(Config):
        variable = "EMBEDSERVE_" + item.name.upper()
        if hasattr(arguments, item.name):  # a flag may say "auto", which is None, over a variable
            given = getattr(arguments, item.name)
            values[item.name] = tuple(given) if isinstance(given, list) else given
        elif environ.get(variable):
            values[item.name] = _from_text(item, environ[variable], variable)
    return Config(**values)


def _serve(config: Config) -> int:
    try:
        from embedserve.supervisor import serve
    except ModuleNotFoundError as error:
        raise StartError(
            f"the server needs the package {error.name}, which is not installed: pip install 'embedserve[server]'"
        ) from error
    return serve(config)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="embedserve", description="A high-throughput embedding server: gRPC and OpenAI-compatible HTTP."
    )
    parser.add_argument("--version", action="version", version=f"embedserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serve a model. Every flag --like-this is also the variable EMBEDSERVE_LIKE_THIS.",
    )
    for item in fields(Config):
        _add_flag(serve, item)
    return parser


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage around it."""

    def error(self, message: str) -> NoReturn:
        self.exit(START_ERROR_STATUS, f"embedserve: {message}\n")


def _add_flag(parser: argparse.ArgumentParser, item: Field[Any]) -> None:
    flag = "--" + item.name.replace("_", "-")
    absent = argparse.SUPPRESS
    default = "auto" if item.default is None else item.default
    text = f"{item.metadata['help']} (default: {default})"
    if item.name == "model":
        parser.add_argument("model", nargs="?", metavar="MODEL", default=absent, help=item.metadata["help"])
    elif item.default is False:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=absent, help=item.metadata["help"])
    elif item.name == "served_model_name":
        parser.add_argument(flag, nargs="+", metavar="NAME", default=absent, help=item.metadata["help"])
    else:
        choices = item.metadata["choices"]
        metavar = "|".join(choices) if choices else _kind(item).__name__.upper()
        parser.add_argument(flag, type=_reader(item), default=absent, metavar=metavar, help=text)


def _reader(item: Field[Any]) -> Callable[[str], Any]:
    """What argparse calls; "auto" is None where that is the default."""

    def read(text: str) -> Any:
        if text == "auto" and item.default is None:
            return None
        return _kind(item)(text)

    read.__name__ = _kind(item).__name__
    return read


def _from_text(item: Field[Any], text: str, variable: str) -> Any:
    if item.name == "served_model_name":
        return tuple(text.replace(",", " ").split())
    if item.default is False:
        if text.lower() not in _BOOLEANS:
            raise StartError(f"{variable} is {text!r}; it must be true or false.")
        return _BOOLEANS[text.lower()]
    try:
        return _reader(item)(text)
    except ValueError as error:
        raise StartError(f"{variable} is {text!r}; it must be {_kind(item).__name__}.") from error


def _kind(item: Field[Any]) -> type:
    """int of `int | None`, and so on."""
    hint = get_type_hints(Config)[item.name]
    kind: type = next((arm for arm in get_args(hint) if arm is not type(None)), hint)
    return kind


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
