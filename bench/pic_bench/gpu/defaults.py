"""An 8B model as users start it: the learnt cost gate, `mode: off` against stock, shift 0, where the host waits."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from pic_bench.compare.server import Server
from pic_bench.gpu.checks import OFF, PROBE, compare, judge
from pic_bench.gpu.record import Found, Work
from pic_bench.gpu.servers import Model, dummy_model, plugin_state, serving
from pic_bench.serving import generate
from sglang_pic.errors import PicError

_WAIT: Final = re.compile(r"(\S+\.py:\d+): UserWarning: called a synchronizing CUDA operation")
_COSTS: Final = re.compile(r"sglang_pic: .* cost (\{[^}]*\})")
# The probe waits once on purpose, to show that warnings arrive.
_PROBES_OWN: Final = "probe_plugin"
_OURS: Final = ("sglang_pic", "pic_kernels")
_TEXT_TOKENS, _HEADER_TOKENS, _QUESTION_TOKENS = 2_000, 200, 300


def run(work: Work) -> Found:
    """A stock server's answers, then everything on ours."""
    model = dummy_model(work, "Llama-3.1-8B")
    count, num_tokens = (2, 300) if work.is_dry else (8, 2_000)
    draw = random.Random(3)
    prompts = [model.tokens(draw, num_tokens) for _ in range(count)]
    with serving(work, "defaults-stock", "stock", model) as server:
        stock = [generate(server, prompt) for prompt in prompts]
    probe = {**PROBE, "sync_debug": True}
    failures: list[str] = []
    with serving(work, "defaults-pic", "pic", model, probe=probe) as server:
        raw: dict[str, Any] = {"state": plugin_state(server)}
        figures = gate_figures(server.log_path.read_text("utf8", errors="replace"))
        strict = [generate(server, prompt, pic=OFF) for prompt in prompts]
        equal = sum(one.ids == other.ids for one, other in zip(stock, strict, strict=True))
        figures["off_equal"] = equal / count
        raw["off_equal_top_20"] = sum(one.first == two.first for one, two in zip(stock, strict, strict=True))
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
