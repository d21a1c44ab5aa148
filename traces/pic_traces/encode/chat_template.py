"""Chat templates: read from a model's folder and rendered by jinja2 as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from pic_traces.errors import TraceError
from pic_traces.lines import read_objects
from pic_traces.session import JsonValue, Message, as_type

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


class TemplateRefusal(Exception):
    """A template did not render a conversation; the message is the template's."""


class ChatTemplate:
    """The chat template of one model.

    Args:
        sources: templates by name; `default`, and `tool_use` where there is one for calls with tools.
        variables: what every rendering sees besides the conversation: the special tokens' texts.
    """

    def __init__(self, sources: dict[str, str], variables: dict[str, JsonValue]) -> None:
        environment = _environment()
        self._templates: dict[str, Template] = {
            name: environment.from_string(source) for name, source in sources.items()
        }
        self._variables = variables
        self.source = "\n".join(sources.values())

    def render(
        self,
        messages: Sequence[Message],
        tools: list[JsonValue] | None,
        options: dict[str, JsonValue],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation.

        Raises:
            TemplateRefusal: the template raised, or met something that it cannot handle.
        """
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **options},
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate:
    """Read the template of a model's folder: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`.

    Raises:
        TraceError: there is none, it is not valid, or the package jinja2 is missing.
    """
    asked = f"tokenizer={str(folder)!r}"
    line = next(read_objects(folder / _CONFIG), None) if (folder / _CONFIG).is_file() else None
    config = {} if line is None else line.value
    sources = _read_sources(folder, config)
    if "default" not in sources:
        raise TraceError(
            f"{asked}: no chat template: neither {_TEMPLATE} nor a `chat_template` in {_CONFIG}; "
            "use a folder that has one, or no tokenizer for approximate counts"
        )
    try:
        return ChatTemplate(sources, _special_tokens(config))
    except ImportError as error:
        raise TraceError(f"{asked}: needs the package jinja2: pip install '.[census]' in the repository") from error
    except Exception as error:  # jinja2's own errors; the package may not be there to name them
        raise TraceError(f"{asked}: the chat template cannot be compiled: {error}") from error


def _read_sources(folder: Path, config: dict[str, JsonValue]) -> dict[str, str]:
    """Templates by name. A file beside the configuration wins over what is in it."""
    files = {"default": folder / _TEMPLATE}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    try:
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{folder}: the chat template cannot be read: {error}") from error
    if sources:
        return sources
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    return {entry.name: entry.template for entry in as_type(value, list[_NamedTemplate]) or ()}


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def _special_tokens(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The special tokens' texts under the names that templates use."""
    extra = as_type(config.get("extra_special_tokens"), dict[str, JsonValue]) or {}
    named = {**extra, **{key: config.get(key) for key in _SPECIAL_TOKENS}}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers gives to templates."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_extension()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    # NOTE: one date for all calls, so that equal calls have equal ids at midnight too.
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment


def _generation_extension() -> type:
    """The tag `generation`, with which templates mark what the model wrote: its body is rendered as it stands."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags: set[str] = {"generation"}  # noqa: RUF012 (what jinja2 declares)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation


def _to_json(value: JsonValue, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
