"""Servers that are unlike the default in one thing: FP8 rows, rows on the host, windows, a draft, adapters, audits, a
context of 64k. The checks are those of `checks`."""

from __future__ import annotations

import json
import random
import time
from statistics import median
from typing import Any, Final

import msgspec
from pic_models import prepare
from pic_models.lora_adapter import write_adapter
from pic_models.tiny import RECIPES

from pic_bench.compare.server import Server
from pic_bench.gpu.checks import ANY_TOLERANCE, CONFIG, HEADER_TOKENS, OFF, PROBE, check_each
from pic_bench.gpu.defaults import OURS, count_waits, gap_passes, replayed_share, waits
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
FLASHINFER: Final = ("--attention-backend", "flashinfer")
_ADAPTER: Final = "one"
# gpt-oss-20b's dimensions with a third of its layers, 14 GB in bf16.
_GPT_OSS_20B: Final = {
    "dtype": "bfloat16",
    "hidden_size": 2_880,
    "intermediate_size": 2_880,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "sliding_window": 128,
    "vocab_size": 201_088,
}
_AUDIT_S: Final = 120.0


def run_fp8(work: Work) -> Found:
    """A small model whose rows are FP8."""
    return check_each(work, small_model(work), {"fp8": FP8}, CONFIG | ANY_TOLERANCE)


def run_host(work: Work) -> Found:
    """A small model whose rows leave the device before they are spliced."""
    return check_each(work, small_model(work), {"host": HOST}, CONFIG | ANY_TOLERANCE, leave=leave)


def leave(server: Server, model: Model) -> None:
    """Compute other text until none of what was there before is on the device."""
    draw = random.Random(9)
    num_slots = msgspec.json.decode(server.get("/server_info"))["max_total_tokens"]
    for _ in range(num_slots // 600 + 2):
        generate(server, model.tokens(draw, 600), max_new_tokens=1, pic=OFF)


def run_windows(work: Work) -> Found:
    """gpt-oss's dimensions: every second layer has a window, and its rows a pool of their own."""
    return check_each(work, windows_model(work), {"windows": ()}, CONFIG | ANY_TOLERANCE)


def windows_model(work: Work) -> Model:
    """gpt-oss with dummy weights; a tiny one in a dry run."""
    if work.is_dry:
        folder = prepare("tiny-gpt-oss", MODELS_FOLDER / "tiny-gpt-oss", progress=print)
        return Model(folder, ("--dtype", "float32", *pool_flags(work)), 49_152)
    config: dict[str, Any] = RECIPES["tiny-gpt-oss"].config | _GPT_OSS_20B
    config["rope_parameters"] |= {"factor": 32.0, "original_max_position_embeddings": 4_096}
    folder = work.folder / "models" / "gpt-oss"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    flags = ("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16")
    return Model(folder, flags, config["vocab_size"], is_dummy=True)


def run_eagle(work: Work) -> Found:
    """A tiny model with an EAGLE draft: rows of either are moved, and wrong ones of the draft's would cost guesses."""
    model, draft = (prepare(name, MODELS_FOLDER / name, progress=print) for name in ("tiny-gqa", "tiny-gqa-eagle"))
    flags = (*EAGLE, "--speculative-draft-model-path", str(draft))
    small = Model(model, pool_flags(work), 49_152)
    found = check_each(work, small, {"eagle": flags}, CONFIG | ANY_TOLERANCE, _guesses)
    if "eagle" in found.raw and found.raw["eagle"]["guesses_hit"]:
        found.figures["eagle_guesses"] = found.raw["eagle"]["guesses"] / found.raw["eagle"]["guesses_hit"]
    return found


def _guesses(server: Server, model: Model) -> dict[str, Any]:
    """Tokens of the draft that were accepted behind spliced prompts, and behind exact hits."""
    draw, right = random.Random(8), {"guesses": 0, "guesses_hit": 0}
    for _ in range(4):
        prompt = model.tokens(draw, 400)
        for name, pic in (("guesses", None), ("guesses_hit", OFF)):
            generate(server, prompt, max_new_tokens=1, pic=pic)
            right[name] += generate(server, prompt, max_new_tokens=48, pic=pic).right_guesses
    return right


def run_audits(work: Work) -> Found:
    """Every splice is audited on FlashInfer, whose plan of a pass waits for the device, on stock servers too."""
    model, flags = small_model(work), () if work.is_dry else FLASHINFER
    arm = make_arm("pic", model, flags, CONFIG | ANY_TOLERANCE | {"audit_rate": 1.0}, PROBE | {"sync_debug": True})
    draw = random.Random(7)
    with sound(work, "audits", model, arm) as server:
        for prompt in [model.tokens(draw, 700) for _ in range(3)]:
            for _ in range(2):
                generate(server, prompt)
        until, audit = time.monotonic() + _AUDIT_S, _audit(server)
        while audit["num_pending"] or not audit["num_audited"]:
            if time.monotonic() > until:
                raise BenchError(f"nothing was audited in {_AUDIT_S:.0f} s: {audit}")
            time.sleep(0.5)
            audit = _audit(server)
        places = waits(server.log_path)
    names = {"audit_waits": OURS, "audit_waits_flashinfer": ("flashinfer",)}
    figures = {} if work.is_dry else {name: float(count_waits(places, parts)) for name, parts in names.items()}
    return Found(figures=figures, raw={"audit": audit, "waits": places})


def _audit(server: Server) -> dict[str, Any]:
    (state,) = msgspec.json.decode(server.get("/server_info"))["internal_states"]
    audit: dict[str, Any] = state["pic"]["audit"]
    return audit


def run_lora(work: Work) -> Found:
    """An 8B model with an adapter: gap passes run eagerly, as by default, then replayed by captured graphs."""
    model = dummy_model(work._replace(model=None), "Llama-3.1-8B")
    adapter = write_adapter(work.folder / "models" / "adapter", 1, model.folder)
    flags = (
        *LORA,
        *(("--lora-backend", "torch_native") if work.is_dry else ()),
        "--lora-paths",
        f"{_ADAPTER}={adapter}",
    )
    found = Found()
    for name, probe in (("lora", PROBE), ("lora_replayed", PROBE | {"replay_lora": True})):
        of_arm = check_each(
            *(work, model, {name: flags}, CONFIG | ANY_TOLERANCE, _adapted), probe=probe, lora_path=_ADAPTER
        )
        found.figures.update(of_arm.figures)
        found.failures.extend(of_arm.failures)
        found.raw.update(of_arm.raw)
    if len(found.raw) == 2:
        eager, replayed = found.raw.values()
        found.figures["lora_replayed"] = replayed_share(replayed["gap_passes"])
        found.figures["lora_gain"] = median(eager["ttft_s"]) / median(replayed["ttft_s"])
    return found


def _adapted(server: Server, model: Model) -> dict[str, Any]:
    """First tokens of a text that moved, served with the adapter, and how its gap passes ran."""
    draw = random.Random(6)
    text, ttft_s = model.tokens(draw, 2_000), list[float]()
    for number in range(8):
        prompt = [*model.tokens(draw, HEADER_TOKENS + 3 * number), *text, *model.tokens(draw, 100)]
        found = first_token(server.base_url, prompt, lora_path=_ADAPTER)
        if number:
            ttft_s.append(found.seconds)
            if found.cached_tokens < 0.8 * len(text):
                raise BenchError(f"{found.cached_tokens} of {len(text)} tokens that moved came from the cache.")
    return {"ttft_s": ttft_s, "gap_passes": gap_passes(server)}


def run_long(work: Work) -> Found:
    """Gaps behind 60,000 tokens with MLA and no graphs, beside an exact hit that computes as many tokens."""
    model, num_tokens = dummy_model(work, "DeepSeek-V2-Lite"), 2_000 if work.is_dry else 60_000
    config = CONFIG | ANY_TOLERANCE
    seconds: dict[str, list[float]] = {"spliced": [], "hit": [], "short": []}
    draw = random.Random(12)
    header, text = model.tokens(draw, HEADER_TOKENS), model.tokens(draw, num_tokens)
    with sound(work, "long", model, make_arm("pic", model, NO_PREFILL_GRAPHS, config)) as server:
        for number in range(2 if work.is_dry else 6):
            question = model.tokens(draw, 300)
            moved = model.tokens(draw, HEADER_TOKENS + 3 * number)
            prompts = {"spliced": moved + text + question, "hit": header + text + moved + question}
            for name, pic in (("spliced", None), ("hit", OFF)):
                found = first_token(server.base_url, prompts[name], pic=pic)
                if number and found.cached_tokens < 0.9 * num_tokens:
                    raise BenchError(
                        f"long: {found.cached_tokens} of {num_tokens} tokens came from the cache ({name})."
                    )
                if number:
                    seconds[name].append(found.seconds)
            seconds["short"].append(first_token(server.base_url, moved + question, pic=OFF).seconds)
    middle = {name: median(each) for name, each in seconds.items()}
    figures = {"long_gap": middle["spliced"] / middle["hit"], "long_gap_short": middle["spliced"] / middle["short"]}
    return Found(figures=figures, raw={"ttft_s": seconds})
