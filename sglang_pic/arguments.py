"""What several verbs have in common: a parser, flags of SGLang's server after `--`, secrets from the environment."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from sglang_pic.errors import ConfigError, did_you_mean

API_KEY: Final = "SGLANG_PIC_API_KEY"
"""The environment variable of the server's `--api-key`; other users of a machine can read the words of a command."""
CACHE_SALT: Final = "SGLANG_PIC_CACHE_SALT"
"""The environment variable of a namespace's `cache_salt`."""
_SERVER_ARGS: Final = "server_args"


def is_http(url: str) -> bool:
    """Whether a text is the address of an HTTP server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def secret(variable: str) -> str | None:
    """The value of an environment variable; None if it is unset or empty."""
    return os.environ.get(variable) or None


def api_key() -> str | None:
    """The server's API key of the environment; None if there is none.

    Raises:
        ConfigError: it cannot be sent in a header.
    """
    key = secret(API_KEY)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{API_KEY}: has a line end, or a character that is not ASCII; copy the key again.")
    return key


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors name the nearest allowed word, and the place of a server's flags."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        """As argparse's; after `collect_after_dashes` what follows a lone `--` is left unread.

        NOTE: argparse cannot say this: a positional of any number that follows another one is matched, with nothing, as
        soon as the first is seen (Python 3.11), and the words after `--` are then an error.
        """
        words: list[str] = list(sys.argv[1:] if args is None else args)
        has_server_args = self.get_default(_SERVER_ARGS) is not None
        cut = words.index("--") if has_server_args and "--" in words else len(words)
        self._words = words[:cut]
        found, unknown = super().parse_known_args(self._words, namespace)
        if has_server_args:
            found.server_args = words[cut + 1 :]
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """As argparse's; it also says of an unknown option what may be meant."""
        options = [*_options(self)]
        flags = [word.partition("=")[0] for word in self._words if word.startswith("--") and word != "--"]
        unknown = next((flag for flag in flags if not any(each.startswith(flag) for each in options)), None)
        if unknown is not None:
            hint = did_you_mean(unknown, options)
            if not hint and self.get_default(_SERVER_ARGS) is not None:
                hint = f"; flags of the server come after a lone `--`: {self.prog} ... -- {unknown} ..."
            message += hint if unknown in message else f"; {unknown} is no option{hint}"
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = did_you_mean(value, map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None


def collect_after_dashes(parser: argparse.ArgumentParser) -> None:
    """Have a `Parser` put whatever follows a lone `--` into `server_args`, unread."""
    parser.set_defaults(**{_SERVER_ARGS: []})


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options of a parser and of those inside it."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)
