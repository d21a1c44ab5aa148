"""Is a server right? Prompts served again by their own chunks, beside exact prefix hits and beside rows made wrong.

The probe throws prefix hits away, so that a prompt sent twice is spliced at shift 0 and must give what it gave cold, as
closely as an exact prefix hit does (`mode: off` keeps these). A control turns the signs of every spliced row, and must
be seen. Text that moved is measured and not judged: how much a model takes is no question of correctness.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from pic_bench.compare.server import Server
from pic_bench.gpu.record import Found, Work
from pic_bench.gpu.servers import Model, dummy_model, make_arm, small_model, sound
from pic_bench.report.stats import top_k_kl
from pic_bench.serving import Answer, generate
from sglang_pic.errors import BenchError, PicError

OFF: Final = {"mode": "off"}
_WRONG: Final = {"testing": {"flip_donors": True}}
PROBE: Final = {"ignore_prefix": True, "request_options": True}  # the part of a server that `compare` needs
CONFIG: Final[dict[str, object]] = {
    "cost_gate": "off",
    "self_test": "refuse",
    "audit_rate": 0.0,
    "core": {"seam_tokens": 1, "min_spliced_tokens": 8, "tail_tokens": 0, "edit": "in_place"},
}
# Random weights take no splice from another context; whether the splice itself is exact is refused on in any case.
ANY_TOLERANCE: Final = {"self_test_kl_limit": 100.0, "self_test_key_limit": 100.0}
_CHECK_SLOTS: Final = {"SGLANG_PIC_CHECK_SLOTS": "1"}
_LEAST_SPLICED: Final = 0.8
# How many prompts, and tokens of each. Only whole pages of 64 are kept, and the sink is computed.
_PROMPTS: Final = 6, 700
_DRY_PROMPTS: Final = 1, 330
# Beside an exact hit: room for six prompts' luck, and never more than a twentieth of what wrong rows do.
_TIMES_HIT: Final = 2.0
_ROOM: Final = 1e-3
_SHARE_OF_WRONG: Final = 0.05
HEADER_TOKENS: Final = 200
FA3: Final = ("--attention-backend", "fa3")
BACKENDS: Final[dict[str, tuple[str, ...]]] = {
    "triton": ("--attention-backend", "triton"),
    "flashinfer": ("--attention-backend", "flashinfer"),
    "page64": (*FA3, "--page-size", "64"),
}


def run_fa3(work: Work) -> Found:
    """A small model on fa3."""
    return _check_small(work, {"fa3": () if work.is_dry else FA3})


def run_backends(work: Work) -> Found:
    """The same on other backends and pages, one server after the other."""
    return _check_small(work, {"page64": ("--page-size", "64")} if work.is_dry else BACKENDS)


def run_mla(work: Work) -> Found:
    """DeepSeek-V2-Lite's dimensions, on the backend that SGLang chooses."""
    return check_each(work, dummy_model(work, "DeepSeek-V2-Lite"), {"mla": ()}, CONFIG | ANY_TOLERANCE)


def _check_small(work: Work, flags: dict[str, tuple[str, ...]]) -> Found:
    """A dry run's small model has random weights."""
    return check_each(work, small_model(work), flags, CONFIG | (ANY_TOLERANCE if work.is_dry else {}))


def check_each(
    work: Work,
    model: Model,
    flags: Mapping[str, tuple[str, ...]],
    config: Mapping[str, object],
    more: Callable[[Server, Model], dict[str, Any]] | None = None,
    probe: Mapping[str, object] = PROBE,
    **options: Any,
) -> Found:
    """One server for each name, and the measurements of `more` on it; an error of one does not stop the next.

    `options` are of `compare`.
    """
    figures: dict[str, float] = {}
    failures, raw = [], {}
    for name, words in flags.items():
        try:
            with sound(work, name, model, make_arm("pic", model, words, config, probe), _CHECK_SLOTS) as server:
                raw[name] = compare(server, model, *(_DRY_PROMPTS if work.is_dry else _PROMPTS), **options)
                raw[name] |= more(server, model) if more is not None else {}
        except PicError as error:
            failures.append(f"{name}: {error}")
            continue
        figures[f"{name}_kl"], wrong = judge(raw[name])
        failures += [f"{name}: {each}" for each in wrong]
    return Found(figures=figures, failures=failures, raw=raw)


def compare(
    server: Server,
    model: Model,
    count: int,
    num_tokens: int,
    *,
    leave: Callable[[Server, Model], None] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Mean KL in nats of the first token, by how a prompt was served; `count` prompts of `num_tokens`.

    `leave` has rows leave the device for the host, from where equal prompts must be spliced then; every request's body
    has `more`.

    Raises:
        BenchError: an equal prompt was not spliced, or not served from the prefix with `mode: off`.
    """

    def ask(tokens: list[int], pic: Mapping[str, object] | None = None) -> Answer:
        return generate(server, tokens, pic=pic, **more)

    draw = random.Random(11)
    kls: dict[str, list[float]] = {"spliced": [], "hit": [], "moved": [], "wrong": []}
    moved_share: list[float] = []
    same, guesses = 0, [0, 0]
    for _ in range(count):
        prompt, header = model.tokens(draw, num_tokens), model.tokens(draw, HEADER_TOKENS)
        cold = ask(prompt)
        if leave is not None:
            leave(server, model)
        again = ask(prompt)
        _require("an equal prompt was not spliced", again.spliced_tokens, again)
        if leave is not None:
            _require("an equal prompt was not spliced from the host", again.fetched_tokens, again)
        strict, hit = ask(prompt, pic=OFF), ask(prompt, pic=OFF)
        _require("with `mode: off` an equal prompt was no prefix hit", hit.cached_tokens, hit)
        full, moved = ask(header + prompt, pic=OFF), ask(header + prompt)
        moved_share.append(moved.spliced_tokens / moved.prompt_tokens)
        wrong = ask(prompt, pic=_WRONG)
        _require("a prompt whose rows are made wrong was not spliced", wrong.spliced_tokens, wrong)
        pairs = (("spliced", cold, again), ("hit", strict, hit), ("moved", full, moved), ("wrong", cold, wrong))
        for name, one, other in pairs:
            kl = top_k_kl(one.first, other.first)
            assert kl is not None, "top_logprobs_num asks for a list"
            kls[name].append(kl)
        same += cold.ids == again.ids
        guesses = [guesses[0] + again.right_guesses, guesses[1] + hit.right_guesses]
    means = {name: float(np.mean(found)) for name, found in kls.items()}
    counts = {"same_answers": same, "prompts": count, "right_guesses": guesses}
    return means | counts | {"moved_share": float(np.mean(moved_share))}


def judge(found: dict[str, Any]) -> tuple[float, list[str]]:
    """The KL at shift 0 over its limit, and the errors."""
    allowed = _TIMES_HIT * found["hit"] + min(_ROOM, _SHARE_OF_WRONG * found["wrong"])
    share = found["spliced"] / allowed if allowed else 0.0 if not found["spliced"] else float("inf")
    failures = []
    if not share <= 1:
        failures.append(f"KL {found['spliced']:.2g} at shift 0, an exact hit has {found['hit']:.2g}")
    if not found["wrong"] > 3 * found["spliced"]:
        failures.append(f"rows made wrong have KL {found['wrong']:.2g} only: the comparison does not see them")
    return share, failures


def _require(what: str, served: int, answer: Answer) -> None:
    if served < _LEAST_SPLICED * answer.prompt_tokens:
        raise BenchError(f"{what}: {served} of {answer.prompt_tokens} tokens.")
