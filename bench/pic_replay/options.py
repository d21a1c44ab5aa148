"""The options of a replay, as one value that is passed to its process as JSON."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import msgspec
from pic_traces.errors import OptionError
from pic_traces.session import JsonValue

from sglang_pic.arguments import is_http

HIDDEN: Final = "[not recorded]"
"""In files, in the place of a secret."""


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one replay; the command line's help has the meaning of each.

    Beyond that: `base_url` is without `/v1`; `custom_params` goes into the body's field of that name, which SGLang
    passes to plugins; `extra_body` is merged last; `secrets` are never written to the run folder.
    """

    schema_version: int = 1
    trace: str
    reader: str | None = None
    base_url: str
    out: str
    sessions: int = 1
    limit_sessions: int | None = None
    limit_calls: int | None = None
    max_tokens: int = 16
    model: str | None = None
    extra_body: dict[str, JsonValue] = {}
    custom_params: dict[str, JsonValue] = {}
    logprobs: int = 0
    warmup: int = 1
    timeout_s: float = 600.0
    api_key: str | None = None
    force: bool = False
    quiet: bool = False

    def check(self) -> ReplayOptions:
        """The options themselves, if every value is allowed.

        Raises:
            OptionError: names the option, its value and the allowed values.
        """
        least = {"sessions": 1, "limit_sessions": 1, "limit_calls": 1, "max_tokens": 1, "warmup": 0, "logprobs": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise OptionError(f"{name}={value!r}: must be {lowest} or more.")
        if self.logprobs > 20:
            raise OptionError(f"logprobs={self.logprobs!r}: must be 20 or less, the most that the OpenAI API allows.")
        if not self.timeout_s > 0:
            raise OptionError(f"timeout_s={self.timeout_s!r}: must be more than 0.")
        if not is_http(self.base_url):
            raise OptionError(f"base_url={self.base_url!r}: must be like http://127.0.0.1:30000.")
        return self

    @property
    def secrets(self) -> list[str]:
        """The API key, the login in the address and the requests' salt, which no file may show."""
        login = urlsplit(self.base_url).netloc.rpartition("@")[0]
        return [str(each) for each in (self.api_key, login, self.extra_body.get("cache_salt")) if each]

    def without_secrets(self) -> ReplayOptions:
        """The same options without `secrets`, for files and messages."""
        key = None if self.api_key is None else HIDDEN
        salt = {"cache_salt": HIDDEN} if self.extra_body.get("cache_salt") else {}
        url = urlsplit(self.base_url)
        url = url._replace(netloc=url.netloc.rpartition("@")[2])
        return msgspec.structs.replace(self, api_key=key, base_url=url.geturl(), extra_body=self.extra_body | salt)
