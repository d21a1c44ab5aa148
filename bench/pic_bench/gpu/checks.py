"""Is a server right? Prompts served again by their own chunks, beside exact prefix hits and beside rows made wrong.

The probe throws prefix hits away, so that a prompt sent twice is spliced at shift 0 and must give what it gave cold, as
closely as an exact prefix hit does (`mode: off` keeps these). A control turns the signs of every spliced row, and must
be seen. Text that moved is measured and not judged: how much a model takes is no question of correctness. An 8B model
runs as users start it: the learnt cost gate, `mode: off` against stock, shift 0, where the host waits.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from pic_bench.compare.server import Server
from pic_bench.gpu.record import Found, Work
from pic_bench.gpu.servers import Model, dummy_model, make_arm, small_model, sound
from pic_bench.report.stats import top_k_kl
from pic_bench.serving import Answer, generate
from sglang_pic.errors import BenchError, PicError

OFF: Final = {"mode": "off"}
_WRONG: Final = {"testing": {"flip_donors": True}}
PROBE: Final = {"ignore_prefix": True, "request_options": True}  # what `compare` needs of a server
_CONFIG: Final = {
    "cost_gate": "off",
    "self_test": "refuse",
    "audit_rate": 0.0,
    "core": {"seam_tokens": 1, "min_spliced_tokens": 8, "tail_tokens": 0, "edit": "in_place"},
}
# Random weights take no splice from another context; whether the splice itself is exact is refused on in any case.
_ANY_TOLERANCE: Final = {"self_test_kl_limit": 100.0, "self_test_key_limit": 100.0}
_CHECK_SLOTS: Final = {"SGLANG_PIC_CHECK_SLOTS": "1"}
_LEAST_SPLICED: Final = 0.8
# How many prompts, and tokens of each. Only whole pages of 64 are kept, and the sink is computed.
_PROMPTS: Final = 6, 700
_DRY_PROMPTS: Final = 2, 330
# Beside an exact hit: room for six prompts' luck, and never more than a twentieth of what wrong rows do.
_TIMES_HIT: Final = 2.0
_ROOM: Final = 1e-3
_SHARE_OF_WRONG: Final = 0.05
_HEADER_TOKENS: Final = 200
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
    return _check_each(work, dummy_model(work, "DeepSeek-V2-Lite"), {"mla": ()}, _CONFIG | _ANY_TOLERANCE)


def _check_small(work: Work, flags: dict[str, tuple[str, ...]]) -> Found:
    """A dry run's small model has random weights."""
    return _check_each(work, small_model(work), flags, _CONFIG | (_ANY_TOLERANCE if work.is_dry else {}))


def _check_each(work: Work, model: Model, flags: dict[str, tuple[str, ...]], config: dict[str, object]) -> Found:
    """One server for each name; what is wrong with one does not stop the next."""
    figures: dict[str, float] = {}
    failures, raw = [], {}
    for name, words in flags.items():
        try:
            with sound(work, name, model, make_arm("pic", model, words, config, PROBE), _CHECK_SLOTS) as server:
                raw[name] = compare(server, model, *(_DRY_PROMPTS if work.is_dry else _PROMPTS))
        except PicError as error:
            failures.append(f"{name}: {error}")
            continue
        figures[f"{name}_kl"], wrong = judge(raw[name])
        failures += [f"{name}: {each}" for each in wrong]
    return Found(figures=figures, failures=failures, raw=raw)


def compare(server: Server, model: Model, count: int, num_tokens: int) -> dict[str, Any]:
    """Mean KL in nats of the first token, by how a prompt was served; `count` prompts of `num_tokens`.

    Raises:
        BenchError: an equal prompt was not spliced, or not served from the prefix with `mode: off`.
    """
    draw = random.Random(11)
    kls: dict[str, list[float]] = {"spliced": [], "hit": [], "moved": [], "wrong": []}
    moved_share: list[float] = []
    same = 0
    for _ in range(count):
        prompt, header = model.tokens(draw, num_tokens), model.tokens(draw, _HEADER_TOKENS)
        cold, again = generate(server, prompt), generate(server, prompt)
        _require("an equal prompt was not spliced", again.spliced_tokens, again)
        strict, hit = generate(server, prompt, pic=OFF), generate(server, prompt, pic=OFF)
        _require("with `mode: off` an equal prompt was no prefix hit", hit.cached_tokens, hit)
        full, moved = generate(server, header + prompt, pic=OFF), generate(server, header + prompt)
        moved_share.append(moved.spliced_tokens / moved.prompt_tokens)
        wrong = generate(server, prompt, pic=_WRONG)
        _require("a prompt whose rows are made wrong was not spliced", wrong.spliced_tokens, wrong)
        pairs = (("spliced", cold, again), ("hit", strict, hit), ("moved", full, moved), ("wrong", cold, wrong))
        for name, one, other in pairs:
            kl = top_k_kl(one.first, other.first)
            assert kl is not None, "top_logprobs_num asks for a list"
            kls[name].append(kl)
        same += cold.ids == again.ids
    means = {name: float(np.mean(found)) for name, found in kls.items()}
    return means | {"same_answers": same, "prompts": count, "moved_share": float(np.mean(moved_share))}


def judge(found: dict[str, Any]) -> tuple[float, list[str]]:
    """The KL at shift 0 over what is allowed, and what is wrong."""
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


_WAIT: Final = re.compile(r"(\S+\.py:\d+): UserWarning: called a synchronizing CUDA operation")
_COSTS: Final = re.compile(r"sglang_pic: .* cost (\{[^}]*\})")
# The probe waits once on purpose, to show that warnings arrive.
_PROBES_OWN: Final = "probe_plugin"
_OURS: Final = ("sglang_pic", "pic_kernels")
_TEXT_TOKENS, _QUESTION_TOKENS = 2_000, 300


def run_defaults(work: Work) -> Found:
    """A stock server's answers, then everything on ours."""
    model = dummy_model(work, "Llama-3.1-8B")
    count, num_tokens = (2, 300) if work.is_dry else (8, 2_000)
    draw = random.Random(3)
    prompts = [model.tokens(draw, num_tokens) for _ in range(count)]
    with sound(work, "defaults-stock", model, make_arm("stock", model)) as server:
        stock = [generate(server, prompt) for prompt in prompts]
    arm = make_arm("pic", model, probe={**PROBE, "sync_debug": True})
    failures: list[str] = []
    with sound(work, "defaults-pic", model, arm) as server:
        raw: dict[str, Any] = {"server_info": msgspec.json.decode(server.get("/server_info"))}
        figures = gate_figures(server.log_path.read_text("utf8", errors="replace"))
        strict = [generate(server, prompt, pic=OFF) for prompt in prompts]
        equal = sum(one.ids == other.ids for one, other in zip(stock, strict, strict=True))
        figures["off_equal"] = equal / count
        if equal < count:
            failures.append(f"{count - equal} of {count} answers of `mode: off` differ from stock's")
        figures["gate_taken"] = taken_share(server, model)
        try:
            raw["shift_0"] = compare(server, model, *((2, 300) if work.is_dry else (6, 1_000)))
            figures["defaults_kl"], wrong = judge(raw["shift_0"])
            failures += wrong
        except PicError as error:
            failures.append(str(error))
        log = server.log_path
    raw["waits"] = waits(log)
    notes = []
    if work.is_dry:
        notes.append("waits for the device are not seen on a CPU")
    elif not any(_PROBES_OWN in place for place in raw["waits"]):
        failures.append("the probe's own wait is not in the log: torch's warnings do not arrive there")
    else:
        figures["waits"] = len([place for place in raw["waits"] if any(name in place for name in _OURS)])
    return Found(figures=figures, notes=notes, failures=failures, raw=raw)


def gate_figures(log: str) -> dict[str, float]:
    """The learnt costs, as the server logs them when it starts; nothing where there is no gate."""
    found = _COSTS.search(log)
    if found is None:
        return {}
    costs = msgspec.json.decode(found[1])
    names = {"gate_computed_us": "computed_token_us", "gate_gap_us": "gap_us", "gate_floor_us": "floor_us"}
    return {figure: costs[name] for figure, name in names.items()}


def taken_share(server: Server, model: Model) -> float:
    """The share of a text that is spliced when it stands behind another, longer header, seams left out."""
    draw = random.Random(4)
    text = model.tokens(draw, _TEXT_TOKENS)
    generate(server, text + model.tokens(draw, _QUESTION_TOKENS))
    moved = generate(server, model.tokens(draw, _HEADER_TOKENS) + text + model.tokens(draw, _QUESTION_TOKENS))
    return moved.spliced_tokens / len(text)


def waits(log: Path) -> list[str]:
    """Places of the code that made the host wait for the device, each once, as torch warned of them."""
    return sorted(set(_WAIT.findall(log.read_text("utf8", errors="replace"))))
