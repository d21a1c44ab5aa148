"""The requests of a soak: sessions of the packaged traces and the seeded generators, with options and faults by chance.

The same seed gives the same requests; which of them meet in a batch is up to the clock.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from pic_models.vision import TOKEN_IDS
from pic_traces.encode.encoded import Encoder
from pic_traces.source import load
from PIL import Image


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and the server of one soak."""

    model: str
    """A name of `pic_models`."""
    parts: tuple[str, ...] = ()
    """Names of `Setting.flags` that the patched server has, too."""
    draft: str | None = None
    """Its draft, as `--speculative-algorithm` and the flags after it."""
    page_size: int = 1
    pool_tokens: int = 1400
    """The patched server's; prompts have up to 420."""
    num_sessions: int = 10
    """Side by side."""
    is_switched: bool = False
    """Splicing is switched off and on; while it is off all answers are compared with stock's."""
    has_images: bool = False
    """Most prompts have an image."""

    @property
    def patched_flags(self) -> str:
        """The patched server's flags, with `{models}` and `{store}` where its folders stand."""
        flags = SETTING.flags
        draft = [flags["without_draft"]] if self.draft is None else [flags["with_draft"], self.draft]
        parts = [flags["patched"], *draft, *(flags[part] for part in self.parts)]
        return " ".join([*parts, f"--max-total-tokens {self.pool_tokens}"])

    @property
    def decode_flags(self) -> str:
        """The flags of the patched server's decode server, with PD disaggregation."""
        return " ".join([SETTING.flags["decode"], SETTING.flags["patched"]])


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """soak.toml."""

    traces: tuple[str, ...]
    invalid: tuple[object, ...]
    flags: dict[str, str]
    environment: dict[str, dict[str, str]]
    probe: dict[str, bool]
    config: dict[str, object]
    setups: dict[str, Setup]


SETTING = msgspec.toml.decode(Path(__file__).with_name("soak.toml").read_bytes(), type=Setting)
_MAX_CALLS = 4
_SHORTEST, _LONGEST = 120, 420
"""Tokens that prompts of a session are cut to; real ones have thousands, and a soak wants many."""
_HEAD = 40
_NUM_IMAGES, _PIXELS = 6, (56, 84, 140, 196)
"""Images that are sent, and how wide and how high they are; 28 x 28 pixels are a token."""
_TALKATIVE_EVERY, _NUM_TALKATIVE = 60, 10
"""Of so many sessions in a row, the last ones get long answers."""
_IMAGE_IDS = [TOKEN_IDS[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
# (cache_salt, extra_key), the first of them for most sessions.
_NAMESPACES = ((None, None), (None, None), (None, None), ("salt-a", None), ("salt-b", None), (None, "key-a"))


class Fault(Enum):
    """The fault that a request gets."""

    NONE = "none"
    ABORT = "abort"  # `/abort_request` at some moment of its life
    DISCONNECT = "disconnect"  # the client goes away in the middle of the stream
    INVALID = "invalid"  # its options are wrong: HTTP 400 is the answer


class Request(NamedTuple):
    """One request and its fault."""

    rid: str
    prompt: list[int]
    new_tokens: int
    pic: object
    cache_salt: str | None = None
    extra_key: str | None = None
    logprob_start: int | None = None
    fault: Fault = Fault.NONE
    moment: float = 0.0
    """In `[0, 1)`: when in its life the fault happens."""
    is_compared: bool = False
    """Its answer is that of a stock server."""
    dp_rank: int | None = None
    """Which rank serves it; SGLang's choice by default."""
    image: str | None = None
    """As a data URL; the prompt has a place for it."""

    @property
    def body(self) -> dict[str, object]:
        """The body for `/generate`."""
        sampling: dict[str, object] = {"temperature": 0, "max_new_tokens": self.new_tokens, "ignore_eos": True}
        if self.pic is not None:
            sampling["custom_params"] = {"pic": self.pic}
        body: dict[str, object] = {"rid": self.rid, "input_ids": self.prompt, "sampling_params": sampling}
        if self.fault is Fault.DISCONNECT:
            body["stream"] = True
        if self.is_compared:
            body |= {"return_logprob": True, "top_logprobs_num": 20}
        if self.logprob_start is not None:
            body |= {"return_logprob": True, "logprob_start_len": self.logprob_start}
        named = {"cache_salt": self.cache_salt, "extra_key": self.extra_key, "routed_dp_rank": self.dp_rank}
        named["image_data"] = self.image
        return body | {name: value for name, value in named.items() if value is not None}


Session = list[list[int]]
"""Prompts that one client sends one after the other."""


def sessions(encoder: Encoder, seed: int) -> Iterator[Session]:
    """Sessions without end; after all of them have come they come again behind other clocks and with other texts."""
    rng = random.Random(seed)
    while True:
        epoch = rng.randrange(1, 1 << 30)
        # Sessions of one trace meet, because they have text in common.
        traces = rng.sample(SETTING.traces, len(SETTING.traces))
        for session in (session for trace in traces for session in load(trace.format(seed=epoch))):
            calls = list(session.calls())
            first = rng.randrange(max(1, len(calls) - _MAX_CALLS + 1))
            length, keeps_end = rng.randint(_SHORTEST, _LONGEST), rng.random() < 0.5
            yield [
                _cut(encoder.encode(call).tokens.tolist(), length, keeps_end=keeps_end)
                for call in calls[first : first + _MAX_CALLS]
            ]


def requests(session: Session, number: int, seed: int, *, with_images: bool = False) -> list[Request]:
    """The requests of a session, which is the `number`-th of its soak; an image has the same text around it in all."""
    rng = random.Random(f"{seed}/{number}")
    image, place = (_image(rng.randrange(_NUM_IMAGES)), rng.randrange(_HEAD)) if with_images else (None, 0)
    cache_salt, extra_key = rng.choice(_NAMESPACES)
    # Sessions that follow each other run side by side: long answers of all of them do not fit into the pool.
    is_talkative = number % _TALKATIVE_EVERY >= _TALKATIVE_EVERY - _NUM_TALKATIVE
    found = []
    for call, prompt in enumerate(session):
        pic, logprob_start = _options(rng, len(prompt))
        fault = rng.choices((Fault.NONE, Fault.ABORT, Fault.DISCONNECT, Fault.INVALID), (74, 12, 10, 4))[0]
        is_off = isinstance(pic, Mapping) and pic.get("mode") == "off"
        found.append(
            Request(
                rid=f"soak-{seed}-{number}-{call}",
                prompt=prompt if image is None else [*prompt[:place], *_IMAGE_IDS, *prompt[place:]],
                image=image,
                new_tokens=64 if is_talkative else rng.choice((1, 1, 2, 4, 8, 16)),
                pic=rng.choice(SETTING.invalid) if fault is Fault.INVALID else pic,
                cache_salt=cache_salt,
                extra_key=extra_key,
                logprob_start=logprob_start,
                fault=fault,
                moment=rng.random(),
                is_compared=is_off and fault is Fault.NONE and rng.random() < 0.4,
            )
        )
    return found


def _options(rng: random.Random, prompt_len: int) -> tuple[object, int | None]:
    """`custom_params.pic`, and from where on logprobs of the prompt are wanted."""
    pin = f"pin-{rng.randrange(6)}"
    pic = rng.choices(
        (
            None,
            {"mode": "auto", "seam_tokens": rng.choice((0, 1, 8, 64)), "tail_tokens": rng.choice((0, 32, 256))},
            {"mode": "off"},
            {"edit": rng.choice(("recompile", "in_place", "notes"))},
            {"pin": pin},
            {"unpin": pin},
            {"skills": "near"},
        ),
        (40, 12, 22, 12, 5, 4, 5),
    )[0]
    return pic, rng.randrange(prompt_len) if rng.random() < 0.03 and pic is None else None


@cache
def _image(number: int) -> str:
    """An image of noise."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (*rng.choice(_PIXELS, 2), 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream := io.BytesIO(), "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _cut(tokens: Sequence[int], length: int, *, keeps_end: bool) -> list[int]:
    """At most `length` tokens: the first ones, or the very first and the last ones, so that turns move the text."""
    if len(tokens) <= length:
        return list(tokens)
    return [*tokens[:_HEAD], *tokens[_HEAD - length :]] if keeps_end else list(tokens[:length])
