"""An 8B model as users start it, beside stock SGLang: answers, memory, the learnt cost gate, shift 0, graphs, waits.

Stock is started twice, because it may differ from itself: what differs there too is no fault of ours.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from pic_replay.machine import gpu_memory_mib

from pic_bench.compare.arms import Arm
from pic_bench.compare.server import Server
from pic_bench.gpu.checks import OFF, PROBE, compare, judge
from pic_bench.gpu.record import Found, Work
from pic_bench.gpu.servers import Model, dummy_model, make_arm, sound
from pic_bench.serving import Answer, generate
from sglang_pic.errors import PicError

_WAIT: Final = re.compile(r"(\S+\.py:\d+): UserWarning: called a synchronizing CUDA operation")
_COSTS: Final = re.compile(r"sglang_pic: .* cost (\{[^}]*\})")
# The probe waits once on purpose, to show that warnings arrive.
_PROBES_OWN: Final = "probe_plugin"
OURS: Final = ("sglang_pic", "pic_kernels")
_TEXT_TOKENS, _QUESTION_TOKENS = 2_000, 300
# What stands before a text is a changed field up to 128 tokens; text behind more of them the default preset computes.
_INSERTED_TOKENS: Final = 64
_Memory: TypeAlias = dict[str, list[int | None]]  # MiB in use before an arm's start, after it and at its end


def run_warm(work: Work) -> Found:
    """Start our server once and have it compute, splice and decode, so that later starts find kernels compiled."""
    model = dummy_model(work, "Llama-3.1-8B")
    with sound(work, "warm", model, make_arm("pic", model, probe=PROBE)) as server:
        taken_share(server, model)
        generate(server, model.tokens(random.Random(2), _TEXT_TOKENS), pic=OFF)
        return Found(figures={"warm_start": server.ready_after_s})


def run_defaults(work: Work) -> Found:
    """A stock server's answers, everything on ours, and the answers of another stock server.

    Where a server fails, what was measured before is kept.
    """
    model = dummy_model(work, "Llama-3.1-8B")
    count, num_tokens = (2, 300) if work.is_dry else (8, 2_000)
    draw, memory = random.Random(3), _Memory()
    prompts = [model.tokens(draw, num_tokens) for _ in range(count)]
    found = Found(raw={"memory_mib": memory})
    try:
        stock = _stock_answers(work, "stock", model, prompts, memory)
        strict = _measure(work, model, prompts, memory, found)
        found.figures["off_equal"] = sum(_equal(stock, strict)) / count
        grown = [used[1] - used[0] for used in memory.values() if used[0] is not None and used[1] is not None]
        if len(grown) == 2:
            found.figures["start_memory"] = grown[1] - grown[0]
        twin = _equal(stock, _stock_answers(work, "twin", model, prompts, memory))
    except (PicError, OSError) as error:
        found.failures.append(str(error))
        return found
    found.figures["stock_equal"] = sum(twin) / count
    if wrong := sum(same and not ours for same, ours in zip(twin, _equal(stock, strict), strict=True)):
        found.failures.append(f"{wrong} of {count} answers of `mode: off` differ from those of both stock servers")
    return found


def _equal(these: Sequence[Answer], those: Sequence[Answer]) -> list[bool]:
    return [one.ids == other.ids for one, other in zip(these, those, strict=True)]


def _stock_answers(work: Work, name: str, model: Model, prompts: Sequence[list[int]], memory: _Memory) -> list[Answer]:
    with _watched(work, name, model, make_arm("stock", model), memory) as server:
        return [generate(server, prompt) for prompt in prompts]


@contextmanager
def _watched(work: Work, name: str, model: Model, arm: Arm, memory: _Memory) -> Iterator[Server]:
    """`sound`, noting the memory of the card as seen from outside."""
    memory[name] = [gpu_memory_mib()]
    with sound(work, f"defaults-{name}", model, arm) as server:
        memory[name].append(gpu_memory_mib())
        yield server
        memory[name].append(gpu_memory_mib())


def _measure(work: Work, model: Model, prompts: Sequence[list[int]], memory: _Memory, found: Found) -> list[Answer]:
    """Our server: its answers with `mode: off`; into `found` everything else."""
    arm = make_arm("pic", model, probe={**PROBE, "sync_debug": True})
    figures, raw = found.figures, found.raw
    with _watched(work, "pic", model, arm, memory) as server:
        raw["server_info"] = msgspec.json.decode(server.get("/server_info"))
        figures.update(gate_figures(server.log_path.read_text("utf8", errors="replace")))
        strict = [generate(server, prompt, pic=OFF) for prompt in prompts]
        figures["gate_taken"] = taken_share(server, model)
        try:
            raw["shift_0"] = compare(server, model, *((2, 300) if work.is_dry else (6, 1_000)))
            figures["defaults_kl"], wrong = judge(raw["shift_0"])
            found.failures.extend(wrong)
        except PicError as error:
            found.failures.append(str(error))
        raw["probe"], raw["waits"] = entry(server, "probe"), waits(server.log_path)
        if not work.is_dry:
            figures["replayed"] = replayed_share(raw["probe"])
    if work.is_dry:
        return strict
    if not any(_PROBES_OWN in place for place in raw["waits"]):
        found.failures.append("the probe's own wait is not in the log: torch's warnings do not arrive there")
    else:
        figures["waits"] = count_waits(raw["waits"], OURS)
    return strict


def entry(server: Server, part: str) -> dict[str, Any]:
    """A part of the plugin's state in `/server_info`."""
    (state,) = msgspec.json.decode(server.get("/server_info"))["internal_states"]
    found: dict[str, Any] = state["pic"][part]
    return found


def replayed_share(probe: dict[str, Any]) -> float:
    """The share of a server's gap passes that a captured graph replayed; NaN where there were none."""
    return probe["num_replayed"] / probe["num_gap_passes"] if probe["num_gap_passes"] else float("nan")


def gate_figures(log: str) -> dict[str, float]:
    """The learnt costs, as the server logs them when it starts; nothing where there is no gate."""
    found = _COSTS.search(log)
    if found is None:
        return {}
    costs = msgspec.json.decode(found[1])
    names = {"gate_computed_us": "computed_token_us", "gate_gap_us": "gap_us", "gate_floor_us": "floor_us"}
    return {figure: costs[name] for figure, name in names.items()}


def taken_share(server: Server, model: Model) -> float:
    """The share of a text that is spliced when it stands behind a header that it did not have, seams left out."""
    draw = random.Random(4)
    text = model.tokens(draw, _TEXT_TOKENS)
    generate(server, text + model.tokens(draw, _QUESTION_TOKENS))
    moved = generate(server, model.tokens(draw, _INSERTED_TOKENS) + text + model.tokens(draw, _QUESTION_TOKENS))
    return moved.spliced_tokens / len(text)


def waits(log: Path) -> list[str]:
    """Places of the code that made the host wait for the device, each once, as torch warned of them."""
    return sorted(set(_WAIT.findall(log.read_text("utf8", errors="replace"))))


def count_waits(places: Sequence[str], parts: Sequence[str]) -> int:
    """How many of the places have one of `parts` in their path; the probe's own do not count."""
    return sum(any(part in place for part in parts) and _PROBES_OWN not in place for place in places)
