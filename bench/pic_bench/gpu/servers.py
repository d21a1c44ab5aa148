"""Servers of the items that need SGLang: which model and which flags, and what is no sound server."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from pic_models import prepare
from pic_models.checkpoint import DEEPSEEK_V2, Config, yarn

from pic_bench.compare.arms import Arm, build_arms
from pic_bench.compare.server import Server
from pic_bench.gpu.record import Work
from pic_bench.probe_plugin import PROBE_PLUGIN, PROBE_VARIABLE
from pic_bench.serving import serving
from sglang_pic.errors import BenchError

MODELS_FOLDER: Final = Path(__file__).resolve().parents[3] / ".models"
_DIMS: Final[dict[str, Config]] = json.loads(Path(__file__).with_name("models.json").read_bytes())
"""Published dimensions, as `config.json` has them; with `kv_lora_rank` the model is one with a latent."""
_DRY: Final = {"DeepSeek-V2-Lite": "tiny-mla-dims", "Llama-3.1-8B": "tiny-gqa-dims"}
"""Their replacements in a dry run."""
_CONTEXT_LEN: Final = 65_536
# Below lie the special tokens of the usual vocabularies, and no 8B model has fewer ids.
_FIRST_ID, _LAST_ID = 1_000, 30_000
_FAULTS: Final = re.compile(r"Traceback|device-side assert|CUDA error|illegal memory access", re.IGNORECASE)


class Model(NamedTuple):
    """The arguments of a server's start, and the size of its vocabulary."""

    folder: Path
    flags: tuple[str, ...]
    vocab: int
    is_dummy: bool = False
    """Without weights of its own: SGLang's dummy weights, sharpened by the probe, in either arm."""

    def tokens(self, random: random.Random, count: int) -> list[int]:
        """Token ids that repeat nothing."""
        return [random.randrange(min(_FIRST_ID, self.vocab // 2), min(self.vocab, _LAST_ID)) for _ in range(count)]


def small_model(work: Work) -> Model:
    """SmolLM2, whose weights come with a package; random weights in a dry run, which are drawn in a second.

    Raises:
        ConfigError: the package is not installed; the message says how to get it.
    """
    name = "tiny-gqa" if work.is_dry else "smollm2"
    folder = prepare(name, MODELS_FOLDER / name, progress=print)
    return Model(folder, pool_flags(work), 49_152)


def dummy_model(work: Work, name: str) -> Model:
    """A model of the dimensions called `name`, with SGLang's dummy weights and no tokenizer."""
    if work.model is not None and "kv_lora_rank" not in _DIMS[name]:
        return Model(Path(work.model), (), _LAST_ID)
    name = _DRY[name] if work.is_dry else name
    folder = work.folder / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(_DIMS[name]), indent=2) + "\n")
    flags = ("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16", *pool_flags(work))
    return Model(folder, flags, int(str(_DIMS[name]["vocab_size"])), is_dummy=True)


def pool_flags(work: Work) -> tuple[str, ...]:
    """A small pool in a dry run."""
    return ("--max-total-tokens", "24000") if work.is_dry else ()


def _config(dims: Config) -> Config:
    family: Config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if "kv_lora_rank" in dims:
        scaling = yarn(factor=_CONTEXT_LEN / 4_096, original_len=4_096, mscale=0.707)
        family = DEEPSEEK_V2 | {"rope_scaling": scaling}
    return {
        **family,
        **dims,
        "max_position_embeddings": _CONTEXT_LEN,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def make_arm(
    arm: str,
    model: Model,
    flags: Sequence[str] = (),
    config: Mapping[str, object] | None = None,
    probe: Mapping[str, object] | None = None,
) -> Arm:
    """A stock server or ours (`pic`) with a model's flags and its switches of the probe."""
    text = None if config is None else json.dumps(config)
    (built,) = build_arms([arm], server_args=[*model.flags, *flags], pic_config=text)
    switches = {**(probe or {}), **({"sharp_dummy": True} if model.is_dummy else {})}
    env = built.env | {PROBE_VARIABLE: json.dumps(switches) if switches else None}
    if model.is_dummy and (plugins := env.get("SGLANG_PLUGINS")):
        # A stock server loads none of this project's plugins, but for the one that makes its weights the same.
        env["SGLANG_PLUGINS"] = f"{plugins},{PROBE_PLUGIN}"
    return msgspec.structs.replace(built, env=env)


@contextmanager
def sound(
    work: Work, name: str, model: Model, arm: Arm, env: Mapping[str, str | None] | None = None
) -> Iterator[Server]:
    """A server of `arm` until the block ends; its log is called `name`.

    Raises:
        BenchError: it does not start, ends by itself or has logged a fault since it was healthy: SGLang's start logs
            tracebacks of what it does without.
    """
    named = msgspec.structs.replace(arm, name=name)
    with serving(str(model.folder), named, work.folder, env=env, start_timeout_s=work.start_s) as server:
        print(f"{name} is healthy after {server.ready_after_s:.0f} s", flush=True)
        start = server.log_path.stat().st_size
        yield server
        log = server.log_path.read_bytes()[start:].decode("utf8", errors="replace")
        if found := _FAULTS.search(log):
            raise BenchError(f"{name}: the server logged a fault, see {server.log_path}: {log[found.start() :][:300]}")
