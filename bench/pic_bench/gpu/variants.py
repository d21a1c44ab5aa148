"""Servers that differ from the default in one thing: FP8 rows, rows on the host, windows, a draft, audits, an adapter
or 60,000 tokens."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from pic_models import prepare
from pic_models.lora_adapter import write_adapter
from pic_models.tiny import RECIPES

from pic_bench.compare.server import Server
from pic_bench.gpu.checks import ANY_TOLERANCE, BACKENDS, CONFIG, HEADER_TOKENS, OFF, PROBE, check_each
from pic_bench.gpu.defaults import OURS, count_waits, entry, replayed_share, waits
from pic_bench.gpu.latency import NO_PREFILL_GRAPHS
from pic_bench.gpu.record import Found, Work
from pic_bench.gpu.servers import MODELS_FOLDER, Model, dummy_model, make_arm, pool_flags, small_model, sound
from pic_bench.serving import first_token, generate
from sglang_pic.errors import BenchError

FP8: Final = ("--kv-cache-dtype", "fp8_e4m3")
# So few slots that other prompts soon take them all.
HOST: Final = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "6000")
EAGLE: Final = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
LORA: Final = (
    *("--enable-lora", "--max-lora-rank", "8", "--max-loras-per-batch", "2"),
    *("--lora-target-modules", "q_proj", "k_proj", "v_proj"),
)
_CONFIG: Final = CONFIG | ANY_TOLERANCE
_AUDIT_S: Final = 120.0


def run_fp8(work: Work) -> Found:
    """A small model whose rows are FP8."""
    return check_each(work, small_model(work), {"fp8": FP8}, _CONFIG)


def run_host(work: Work) -> Found:
    """A small model whose rows leave the device before they are spliced."""
    return check_each(work, small_model(work), {"host": HOST}, _CONFIG, leave=_leave)


def _leave(server: Server, model: Model) -> None:
    """Compute other text until no earlier row is on the device."""
    draw = random.Random(9)
    num_slots = msgspec.json.decode(server.get("/server_info"))["max_total_tokens"]
    for _ in range(num_slots // 600 + 2):
        generate(server, model.tokens(draw, 600), max_new_tokens=1, pic=OFF)


def run_windows(work: Work) -> Found:
    """gpt-oss: every second layer has a window, and its rows a pool of their own."""
    return check_each(work, windows_model(work), {"windows": ()}, _CONFIG)


def windows_model(work: Work) -> Model:
    """gpt-oss-20b's dimensions, a third of its layers, with dummy weights (14 GB); a tiny one in a dry run."""
    if work.is_dry:
        folder = prepare("tiny-gpt-oss", MODELS_FOLDER / "tiny-gpt-oss", progress=print)
        return Model(folder, ("--dtype", "float32", *pool_flags(work)), 49_152)
    recipe, folder = RECIPES["tiny-gpt-oss"].config, work.folder / "models" / "gpt-oss"
    dims = json.loads(Path(__file__).with_name("gpt_oss.json").read_text("utf8"))
    rotation = {**msgspec.to_builtins(recipe["rope_parameters"]), "factor": 32.0}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 4}
    config = recipe | dims | layers | {"rope_parameters": rotation | {"original_max_position_embeddings": 4_096}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    flags = ("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16")
    return Model(folder, flags, dims["vocab_size"], is_dummy=True)


def run_eagle(work: Work) -> Found:
    """A tiny model with an EAGLE draft: rows of either are moved, and wrong ones of the draft's would cost guesses."""
    folder, draft = (prepare(name, MODELS_FOLDER / name, progress=print) for name in ("tiny-gqa", "tiny-gqa-eagle"))
    model, flags = Model(folder, pool_flags(work), 49_152), (*EAGLE, "--speculative-draft-model-path", str(draft))
    found = check_each(work, model, {"eagle": flags}, _CONFIG, max_new_tokens=48)
    if eagle := found.raw.get("eagle"):
        found.figures["eagle_guesses"] = eagle["right_guesses"][0] / max(1, eagle["right_guesses"][1])
    return found


def run_audits(work: Work) -> Found:
    """Every splice is audited on FlashInfer, whose plan of a pass waits for the device, on stock servers too."""
    model, flags, draw = small_model(work), () if work.is_dry else BACKENDS["flashinfer"], random.Random(7)
    arm = make_arm("pic", model, flags, _CONFIG | {"audit_rate": 1.0}, PROBE | {"sync_debug": True})
    with sound(work, "audits", model, arm) as server:
        for prompt in [model.tokens(draw, 700) for _ in range(3)]:
            for _ in range(2):
                generate(server, prompt)
        until = time.monotonic() + _AUDIT_S
        while (audit := entry(server, "audit"))["num_pending"] or not audit["num_audited"]:
            if time.monotonic() > until:
                raise BenchError(f"not all was audited in {_AUDIT_S:.0f} s: {audit}")
            time.sleep(0.5)
        places = waits(server.log_path)
    names = {"audit_waits": OURS, "audit_waits_flashinfer": ("flashinfer",)}
    figures = {} if work.is_dry else {name: float(count_waits(places, parts)) for name, parts in names.items()}
    return Found(figures=figures, raw={"audit": audit, "waits": places})


def run_lora(work: Work) -> Found:
    """A small model with an adapter: gap passes run eagerly, as by default, then replayed by captured graphs.

    SGLang loads no adapter beside dummy weights.
    """
    model = small_model(work)
    adapter = write_adapter(work.folder / "models" / "adapter", 1, model.folder)
    flags = (*LORA, "--lora-paths", f"one={adapter}", *(("--lora-backend", "torch_native") if work.is_dry else ()))
    found = Found()
    for name, probe in (("lora", PROBE), ("lora_replayed", PROBE | {"replay_lora": True})):
        of_arm = check_each(work, model, {name: flags}, _CONFIG, _adapted, probe, lora_path="one")
        found.figures.update(of_arm.figures)
        found.failures.extend(of_arm.failures)
        found.raw.update(of_arm.raw)
    if len(found.raw) == 2:
        eager, replayed = found.raw.values()
        found.figures["lora_replayed"] = replayed_share(replayed["probe"])
        found.figures["lora_gain"] = median(eager["ttft_s"]) / median(replayed["ttft_s"])
    return found


def _adapted(server: Server, model: Model) -> dict[str, Any]:
    """First tokens of a text that moved, served with the adapter, and how its gap passes ran."""
    draw, ttft_s = random.Random(6), list[float]()
    text = model.tokens(draw, 2_000)
    for number in range(8):
        prompt = [*model.tokens(draw, HEADER_TOKENS + 3 * number), *text, *model.tokens(draw, 100)]
        found = first_token(server.base_url, prompt, lora_path="one")
        ttft_s.append(found.seconds)
        _came_from_the_cache(found.cached_tokens if number else len(text), len(text))
    return {"ttft_s": ttft_s[1:], "probe": entry(server, "probe")}


def run_long(work: Work) -> Found:
    """Gaps behind 60,000 tokens with MLA and no graphs, beside an exact hit that computes as many tokens."""
    model, num_tokens, draw = dummy_model(work, "DeepSeek-V2-Lite"), 2_000 if work.is_dry else 60_000, random.Random(12)
    seconds: dict[str, list[float]] = {"spliced": [], "hit": []}
    header, text = model.tokens(draw, HEADER_TOKENS), model.tokens(draw, num_tokens)
    with sound(work, "long", model, make_arm("pic", model, NO_PREFILL_GRAPHS, _CONFIG)) as server:
        for number in range(3 if work.is_dry else 6):
            moved, question = model.tokens(draw, HEADER_TOKENS + 3 * number), model.tokens(draw, 300)
            for name, prompt, pic in (
                ("spliced", moved + text + question, None),
                ("hit", header + text + moved + question, OFF),
            ):
                found = first_token(server.base_url, prompt, pic=pic)
                seconds[name].append(found.seconds)
                _came_from_the_cache(found.cached_tokens if number else num_tokens, num_tokens)
    spliced, hit = (median(each[1:]) for each in seconds.values())
    return Found(figures={"long_gap": spliced / hit}, raw={"ttft_s": seconds})


def _came_from_the_cache(num_cached: int, num_tokens: int) -> None:
    if num_cached < 0.8 * num_tokens:
        raise BenchError(f"{num_cached} of {num_tokens} tokens came from the cache, nine tenths are wanted.")
