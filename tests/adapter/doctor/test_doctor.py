"""`sglang-pic doctor` says before a server is started what start-up would say, from the same tables."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import requires
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from sglang_pic.adapter.sglang.bodies import known_versions
from sglang_pic.adapter.sglang.contract import BUILT_FOR, installed_version
from sglang_pic.adapter.support import SUPPORT, Area, Level, check_support, find
from sglang_pic.cli import main
from sglang_pic.errors import UnsupportedError
from tests.conftest import ROOT
from tests.helpers.deploy_files import servers
from tests.helpers.flags_once import read_flags_once
from tests.helpers.processes import forked

_SCHEDULED = ("--enable-mixed-chunk", "--enable-priority-scheduling", "--dp-size", "2")
_SPLIT = ("--prefill-attention-backend", "flashinfer", "--decode-attention-backend", "trtllm_mla")
_SENDS = ("--disaggregation-mode", "prefill")
_WITHOUT_MODEL = {"no model": (["--json"], ""), "only flags": (["--json", "--", "--page-size", "64"], "")}


def on(card: str, model: str, *flags: str, config: str = "") -> tuple[list[str], str]:
    return [model, "--json", "--card", card, "--", *flags], config


def _draft(algorithm: str, model: str) -> tuple[str, ...]:
    return ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", model)


class Answer(NamedTuple):
    """What one call printed."""

    code: int
    out: str
    err: str

    @property
    def found(self) -> dict[str, Any]:
        return dict(json.loads(self.out))

    @property
    def tested(self) -> set[str]:
        return {one["what"] for one in self.found["findings"] if one["level"] == "CPU only"}

    def level(self, area: Area, what: str) -> str:
        (level,) = {one["level"] for one in self.found["findings"] if (one["area"], one["what"]) == (area.value, what)}
        return "tested" if level == "CPU only" else str(level)


def ask(cases: dict[str, tuple[list[str], str]]) -> dict[str, Answer]:
    """The answers to several calls of the verb; SGLang's source and the tokenizer of each folder are read once."""
    from sglang_pic.adapter.doctor import examine

    read, known = examine.read_tokenizer, {}

    def read_once(server_args: Any) -> Any:
        which = server_args.model_path, server_args.skip_tokenizer_init
        if which not in known:
            known[which] = read(server_args)
        return known[which]

    examine.check_contract = functools.cache(examine.check_contract)
    examine.read_tokenizer = read_once
    answers = {}
    for name, (words, config) in cases.items():
        os.environ["SGLANG_PIC_CONFIG"] = config
        out, err = io.StringIO(), io.StringIO()
        variables = {"SGLANG_USE_HND_KVCACHE": "1"} if name == "variable" else {}
        with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ, variables):
            warnings.simplefilter("ignore")
            code = main(["doctor", *words])
        answers[name] = Answer(code, out.getvalue(), err.getvalue())
    return answers


def family(folder: Path, name: str, **changes: object) -> str:
    """A folder with the configuration of a family that people serve."""
    from pic_bench.pages.families import load_families

    (config,) = (each.config for each in load_families() if each.name.split(",")[0] == name)
    (made := folder / name).mkdir()
    (made / "config.json").write_text(json.dumps({"dtype": "bfloat16"} | config | changes))
    return str(made)


def without_splices(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Servers of models whose prompts cannot be spliced."""
    hybrid, pooled = (family(folder, name) for name in ("Qwen3-Next", "DeepSeek-V4"))
    # As LongCat-Flash-Lite has them.
    n_grams = family(folder, "LongCat-2.0", ngram_vocab_size_ratio=78, emb_neighbor_num=4, emb_split_num=4)
    return {
        "hybrid": on("h100", hybrid, "--pp-size", "2"),
        "hybrid in words": ([hybrid, "--card", "b200"], ""),
        "int8 states": on("h100", hybrid, "--enable-int8-mamba-checkpoint"),
        "pooled rows": on("h200", pooled, "--tp-size", "8"),
        "n-grams": on("h200", n_grams, "--tp-size", "8"),
        "all windows": on("h200", family(folder, "Unlimited-OCR")),
    }


def as_typed(folder: Path, gqa: str) -> dict[str, tuple[list[str], str]]:
    """In words instead of JSON, and what cannot be read."""
    (folder / "empty").mkdir()
    return {
        "bad flag": on("h100", gqa, "--no-such-flag", "3"),
        "other cache": on("h100", gqa, "--radix-cache-backend", "flexkv"),
        "no folder": on("h100", str(folder / "nowhere")),
        "empty folder": on("h100", str(folder / "empty")),
        "text": ([gqa, "--card", "h100"], ""),
    }


@pytest.fixture(scope="module")
def fresh() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: SGLang finds its platform once, and none may have asked for it before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=read_flags_once) as executor:
        yield executor


@pytest.fixture(scope="module")
def answers(
    model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, fresh: ProcessPoolExecutor
) -> dict[str, Answer]:
    """Servers on cards that are not here, of models without weights."""
    folder = tmp_path_factory.mktemp("models")

    def without_weights(name: str, **changes: object) -> str:
        copy = folder / f"{name}-{len(list(folder.iterdir()))}"
        shutil.copytree(model_dir(name), copy, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((copy / "config.json").read_text()) | changes
        (copy / "config.json").write_text(json.dumps(config))
        return str(copy)

    gqa, mla, gemma, gpt_oss = map(without_weights, ("tiny-gqa", "tiny-mla", "tiny-gemma3", "tiny-gpt-oss"))
    longer = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    dynamic = without_weights("tiny-gqa", rope_scaling=longer, rope_parameters=longer)
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 2048}
    phi = without_weights("tiny-gqa", rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors})
    without_tokenizer = without_weights("tiny-gqa")
    for file in Path(without_tokenizer).glob("tokenizer*"):
        file.unlink()

    cases = {
        "hopper": on("h100", gqa),
        "blackwell": on("b200", gqa),
        "refused": on("b200", mla, "--pp-size", "2", "--kv-cache-dtype", "fp8_e5m2", "--page-size", "64"),
        "rotary": on("h100", dynamic),
        "draft, host": on("h100", gqa, *_draft("DFLASH", gqa), *_HOST_CUT),
        "draft": on("h100", gqa, *_draft("NEXTN", gqa)),
        "prefill": on("h100", gqa, *_SENDS),
        "decode": on("h100", gqa, "--disaggregation-mode", "decode"),
        "deterministic": on("h100", gqa, "--enable-deterministic-inference"),
        "on policy": on("h100", gqa, "--rl-on-policy-target", "fsdp"),
        "windows": on("h100", gpt_oss),
        "always plain": on("h100", gemma),
        "certificate": on("h100", gqa, config='{"certificate": "lost.json"}'),
        "sglang": on("h100", gqa, "--enable-prefill-cp"),
        "computed": on("a100", gqa, "--enable-return-hidden-states", "--skip-tokenizer-init", *_SCHEDULED),
        "dp attention": on("h100", mla, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        "lora": on("h100", gqa, "--lora-paths", "a=b", *_LORA.split()),
        "few rows": on("a100", gqa, "--max-running-requests", "1"),
        "decoding kept": on("b200", mla, *_SPLIT),
        "long": on("h100", phi, "--context-length", "2048"),
        "too long": on("h100", phi),
        "variable": on("h100", gqa),
        "no tokenizer": on("h100", without_tokenizer),
        "chunks": on("h100", without_weights("tiny-gqa", attention_chunk_size=8192), "--enable-mixed-chunk"),
    }
    cases |= {f"odd {key}": on("h100", without_weights("tiny-gqa", **{key: value})) for key, value in ODD.items()}
    cases |= {place: on("h100", gqa, *flags) for place, flags in servers().items()}
    others = _WITHOUT_MODEL | without_splices(folder) | as_typed(folder, gqa)
    return fresh.submit(ask, others | cases).result(280)


ODD: dict[str, object] = {"quantization_config": [1], "rope_parameters": ["a"]}
ODD |= dict.fromkeys(("architectures", "max_position_embeddings"))
"""Keys of a configuration, and values that SGLang or transformers stumble over."""
SERVED = {
    "hopper": {"LlamaForCausalLM", "RotaryEmbedding", "rows of bfloat16", "pages of 1", "tensor parallelism of 1"},
    "windows": {"GptOssForCausalLM", "YaRNScalingRotaryEmbedding", "sliding windows in a pool of their own"},
    "always plain": {"Gemma3ForCausalLM", "Gemma3RotaryEmbedding"},
    "computed": {"mixed chunks", "priority scheduling", "data parallelism"},
    "dp attention": {"DP attention", "DeepseekScalingRotaryEmbedding"},
    "lora": {"LoRA adapters"},
    "decoding kept": {"flashinfer", "DeepseekScalingRotaryEmbedding"},
    "rotary": {"LlamaForCausalLM"},
    "long": {"LlamaForCausalLM"},
}
_HOST_CUT = ("--enable-hierarchical-cache", "--hicache-mem-layout", "page_head")
REFUSED = {
    "draft, host": [
        ("--speculative-algorithm", ""),
        ("--hicache-mem-layout page_head", "; use layer_first, page_first or page_first_direct"),
    ],
    "refused": [("--pp-size 2", ""), ("rows of float8_e5m2", "; start with --kv-cache-dtype auto or fp8_e4m3")],
    "too long": [(r"the rotary embedding Phi3\w+ in a context of 8192 tokens", "; start with --context-length 2048")],
    "variable": [("use_hnd other than False", "; unset SGLANG_USE_HND_KVCACHE and the layout flags")],
    "chunks": [("mixed chunks with attention in chunks", "; remove --enable-mixed-chunk")],
    "few rows": [("--max-running-requests 1", "; allow 2 or more")],
}
"""What is named, and how the line ends."""


@pytest.mark.parametrize("case", SERVED)
def test_a_server_would_start_with_what_was_tested(case: str, answers: dict[str, Answer]) -> None:
    """There are no weights in the folder: nothing of them is read."""
    assert (answers[case].code, answers[case].found["refused"]) == (0, [])
    assert SERVED[case] <= answers[case].tested
    assert answers[case].found["computed"], "requests opt out on every server"


@pytest.mark.parametrize("place", servers())
def test_servers_of_the_files_for_deployment_would_start(place: str, answers: dict[str, Answer]) -> None:
    assert (answers[place].code, answers[place].found["refused"]) == (0, [])


@pytest.mark.parametrize(
    ("case", "card", "attention"), [("hopper", "h100", "fa3"), ("blackwell", "b200", "trtllm_mha")]
)
def test_each_card_has_its_own_backend(case: str, card: str, attention: str, answers: dict[str, Answer]) -> None:
    """SGLang chooses by the card; what it chooses is judged by the table, whatever stands there."""
    backend, answer = find(Area.ATTENTION, attention), answers[case]
    level = "refused" if backend is None else backend.level.name.lower()
    assert (answer.found["machine"], answer.level(Area.ATTENTION, attention)) == (card, level)
    assert answer.code == (level == "refused")
    if level == "refused":
        assert re.fullmatch(r".*'trtllm_mha': .*--attention-backend flashinfer\.", *answer.found["refused"])
    if case == "blackwell":
        assert answer.level(Area.POOL, "pages of 64") == "admitted"


@pytest.mark.feature("PD disaggregation")
@pytest.mark.parametrize("case", ["prefill", "decode"])
def test_prefill_and_decode_servers_would_start(case: str, answers: dict[str, Answer]) -> None:
    """A decode server has no radix cache unless it is asked for."""
    assert (answers[case].code, answers[case].found["refused"]) == (0, [])
    assert "PD disaggregation" in answers[case].tested


@pytest.mark.feature("--speculative-algorithm", "--hicache-mem-layout", "--pp-size")
@pytest.mark.parametrize("case", REFUSED)
def test_features_that_are_refused(case: str, answers: dict[str, Answer]) -> None:
    """All at once, with the flags as users give them, and configurations of such models; the check fails."""
    assert answers[case].code == 1
    for line, (what, rest) in zip(answers[case].found["refused"], REFUSED[case], strict=True):
        assert re.fullmatch(rf"--radix-cache-backend pic does not work with {what}[ :].*{rest}\.", line)


_QWEN, _DEEPSEEK, _DSA, _GPT_OSS = "Qwen3", "DeepSeek-V3", "DeepSeek-V3.2", "gpt-oss"
_HOST, _PREFILL = "--enable-hierarchical-cache", "--disaggregation-mode prefill"
_FILES = "--hicache-storage-backend file"
_DP = "--tp-size 2 --dp-size 2 --enable-dp-attention"
_DRAFT = "--speculative-algorithm EAGLE --speculative-draft-model-path DRAFT"
_LORA = "--enable-lora --max-lora-rank 8 --lora-target-modules all"
REFUSALS = [entry for entry in SUPPORT if entry.path and entry.level is Level.REFUSED]
TYPED: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "--dllm-algorithm": [("LLaDA-2.1", "--dllm-algorithm LowConfidence", {})],
    "a model that does not generate": [(_QWEN, "--is-embedding", {})],
    "fa4 with MLA on other cards than SM100": [
        (_DEEPSEEK, "--attention-backend fa4", {}),
        (_DEEPSEEK, "--prefill-attention-backend fa4 --decode-attention-backend fa3", {}),
    ],
    "--pp-size": [(_QWEN, "--pp-size 2", {}), (_QWEN, "--pipeline-parallel-size 2", {})],
    "--dcp-size": [(_QWEN, "--tp-size 2 --dcp-size 2", {})],
    "--attn-cp-size": [(_QWEN, "--tp-size 2 --attn-cp-size 2", {})],
    "--enable-prefill-cp": [(_QWEN, "--enable-prefill-cp --cp-strategy zigzag --tp-size 2 --attn-cp-size 2", {})],
    "--dwdp-size": [(_DEEPSEEK, "--tp-size 2 --dwdp-size 2", {})],
    "--elastic-ep-backend": [(_DEEPSEEK, "--tp-size 2 --ep-size 2 --elastic-ep-backend mooncake", {})],
    "--enable-pd-role-switch": [(_QWEN, f"{_PREFILL} --enable-pd-role-switch", {})],
    "--enable-two-batch-overlap": [(_DEEPSEEK, f"{_DP} --enable-two-batch-overlap --moe-a2a-backend deepep", {})],
    "--enable-pdmux": [(_QWEN, "--enable-pdmux --disable-overlap-schedule --chunked-prefill-size -1", {})],
    "LoRA adapters with DP attention": [
        (_QWEN, f"{_DP} {_LORA}", {}),
        (_QWEN, f"--tp-size 2 --attn-dp-size 2 {_LORA}", {}),
    ],
    "--speculative-algorithm": [(_QWEN, _DRAFT.replace("EAGLE", "DFLASH"), {})],
    "mixed chunks beside speculative decoding": [(_QWEN, f"--enable-mixed-chunk {_DRAFT}", {})],
    "mixed chunks with attention in chunks": [("Llama-4", "--enable-mixed-chunk", {})],
    "SGLANG_DISAGG_STAGING_BUFFER": [(_QWEN, _PREFILL, {"SGLANG_DISAGG_STAGING_BUFFER": "1"})],
    "SGLANG_RUST_SERVER": [(_QWEN, "", {"SGLANG_RUST_SERVER": "1"})],
    "--smg-grpc-mode": [(_QWEN, "--smg-grpc-mode", {})],
    "SGLANG_HTTP_SERVER_APP_PATH": [(_QWEN, "", {"SGLANG_HTTP_SERVER_APP_PATH": "other:app"})],
    "SGLANG_RADIX_FORCE_MISS": [(_QWEN, "", {"SGLANG_RADIX_FORCE_MISS": "1"})],
    "a store of HiCache with sliding windows in a pool of their own": [(_GPT_OSS, f"{_HOST} {_FILES}", {})],
    "a store of HiCache with STANDALONE": [(_QWEN, f"{_HOST} {_DRAFT.replace('EAGLE', 'STANDALONE')} {_FILES}", {})],
    "a store of HiCache with multi-layer EAGLE": [(_QWEN, f"{_HOST} {_DRAFT} --enable-multi-layer-eagle {_FILES}", {})],
    "--hicache-host-memory-mode": [(_QWEN, f"{_HOST} --hicache-host-memory-mode buffer_only {_FILES}", {})],
    "--hicache-mem-layout": [(_QWEN, f"{_HOST} --hicache-mem-layout page_head", {})],
    "--hicache-storage-backend": [
        (
            _QWEN,
            f"--disaggregation-mode decode {_HOST} --hicache-storage-backend file "
            "--disaggregation-decode-enable-radix-cache",
            {},
        )
    ],
    "--disable-radix-cache": [(_QWEN, "--disable-radix-cache", {})],
    "--enable-lmcache": [(_QWEN, "--enable-lmcache", {})],
    "--enable-flexkv": [(_QWEN, "--enable-flexkv", {})],
    "--enable-unified-memory": [(_GPT_OSS, "--enable-unified-memory", {})],
    "--enable-return-routed-experts": [(_QWEN, "--enable-return-routed-experts", {})],
    "--enable-return-indexer-topk": [("GLM-5", "--enable-return-indexer-topk", {})],
    "--kv-canary": [(_QWEN, "--kv-canary raise", {}), (_QWEN, "--kv-canary log", {})],
}
"""What people type for each refusal: the model, the flags, and variables of the environment."""


def ask_for_each(folder: Path) -> dict[str, list[tuple[list[str], str]]]:
    """For each of `TYPED` the refusals of doctor and the error of start-up."""
    from pic_bench.pages.families import load_families

    from sglang_pic.adapter.doctor.examine import refusals_of
    from sglang_pic.adapter.doctor.server import resolve

    configs = {family.name.split(",")[0]: family.config for family in load_families()}
    answers: dict[str, list[tuple[list[str], str]]] = {what: [] for what in TYPED}
    cases = [(what, *case) for what, found in TYPED.items() for case in found]
    for number, (name, model, flags, variables) in enumerate(cases):
        (own := folder / f"{number}").mkdir()
        (own / "config.json").write_text(json.dumps({"dtype": "bfloat16"} | configs[model]))
        with (
            patch.dict(os.environ, variables),
            resolve(str(own), flags.replace("DRAFT", str(own)).split(), card="h200") as resolved,
        ):
            lines, error = [*refusals_of(resolved)], ""
            # As SGLang hands arguments to the scheduler's process: as given, with what it made of them apart.
            resolved.context.server_args = pickle.loads(pickle.dumps(resolved.context.server_args))
            try:
                check_support(resolved.context)
            except UnsupportedError as refused:
                error = str(refused)
        answers[name].append((lines, error))
    return answers


@pytest.fixture(scope="module")
def refused(
    tmp_path_factory: pytest.TempPathFactory, fresh: ProcessPoolExecutor
) -> dict[str, list[tuple[list[str], str]]]:
    return fresh.submit(ask_for_each, tmp_path_factory.mktemp("refused")).result(280)


@pytest.mark.feature(*TYPED)
@pytest.mark.parametrize("what", TYPED)
def test_each_refusal_is_one_line_that_names_it_and_says_what_to_change(
    what: str, refused: dict[str, list[tuple[list[str], str]]]
) -> None:
    """SGLang resolves what people type; doctor and start-up refuse it alike."""
    (entry,) = (entry for entry in REFUSALS if entry.what == what)
    for lines, error in refused[what]:
        (line,) = (line for line in lines if f" does not work with {what}" in line)
        assert line.startswith(f"--radix-cache-backend pic does not work with {what}")
        assert line.endswith(f": {entry.reason}; {entry.change}.")
        assert "\n" not in line
        assert error == lines[0]


def test_what_people_type_is_known_for_each_refusal() -> None:
    assert set(TYPED) == {entry.what for entry in REFUSALS}


@pytest.mark.feature(
    "recurrent state", "rows of several positions", "embeddings of n-grams", "sliding windows in all layers"
)
@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("hybrid", "recurrent state"),
        ("pooled rows", "rows of several positions"),
        ("n-grams", "embeddings of n-grams"),
        ("all windows", "sliding windows in all layers"),
    ],
)
def test_a_server_without_splices_is_a_third_answer(case: str, what: str, answers: dict[str, Answer]) -> None:
    """With an exit status of its own. Flags that splices refuse do not matter."""
    answer, entry = answers[case], find(Area.MODEL, what)
    assert entry is not None
    assert (answer.code, answer.found["refused"], answer.found["computed"]) == (3, [], [])
    assert answer.found["prefix_only"] == f"{what}: {entry.reason}"
    assert answer.level(Area.MODEL, what) == "prefix only"
    assert answers["hopper"].found["prefix_only"] == ""


@pytest.mark.feature("recurrent state")
def test_what_a_named_cache_costs_a_server_without_splices_is_said(answers: dict[str, Answer]) -> None:
    """Every place in SGLang that looks for a name refuses one flag: a new one would fail this."""
    from sglang_pic.adapter.doctor.findings import OWN_CACHE_ONLY

    *_, said, _, last = answers["hybrid in words"].out.splitlines()
    assert answers["hybrid in words"].code == 3
    assert said.startswith("would start as prefix only, with SGLang's own cache")
    assert last == f"  SGLang takes {', '.join(OWN_CACHE_ONLY)} only without --radix-cache-backend"
    assert answers["int8 states"].code == 1
    assert "Omit --radix-cache-backend" in answers["int8 states"].found["refused"][0]
    (groups,) = (Path(place) for place in importlib.import_module("sglang.srt.arg_groups").__path__)
    asking = {path.name for path in groups.glob("*.py") if "cfg.radix_cache_backend" in path.read_text()}
    assert asking == {"hicache_hook.py", "kv_shard_hook.py", "mamba_hook.py"}


def test_a_draft_is_judged(answers: dict[str, Answer]) -> None:
    draft = answers["draft"]
    assert "speculative decoding" in draft.tested
    assert draft.code == len(draft.found["refused"]) == int(installed_version() != BUILT_FOR)
    assert all(line.endswith("start without speculative decoding.") for line in draft.found["refused"])
    assert "NGRAM" not in {found["what"] for found in draft.found["findings"]}


def test_a_refusal_of_sglangs_is_one_line_and_a_failed_check(answers: dict[str, Answer]) -> None:
    (said,) = answers["sglang"].found["refused"]
    assert answers["sglang"].code == 1
    assert re.fullmatch(r"SGLang itself refuses these arguments: --cp-strategy must be set .*", said)


@pytest.mark.parametrize("key", ODD)
def test_a_configuration_that_cannot_be_used_is_one_line_and_a_failed_check(
    key: str, answers: dict[str, Answer]
) -> None:
    answer = answers[f"odd {key}"]
    (said,) = answer.found["refused"]
    assert (answer.code, "Traceback" in answer.err, "\n" in said) == (1, False, False)
    assert re.match(r"the configuration of '.*tiny-gqa-\d+' cannot be used: \w+Error: ", said)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("bad flag", r"server flags: unrecognized arguments: --no-such-flag 3"),
        ("other cache", r"server flags: --radix-cache-backend flexkv takes another cache than this plugin's; leave .*"),
        ("no folder", r"model='.*nowhere': no such folder; .*"),
        ("empty folder", r"model='.*empty': the folder has no config\.json; .*"),
        ("only flags", r"server flags '--page-size 64': name a MODEL before `--` to check .*"),
    ],
)
def test_what_cannot_be_read_is_a_usage_error(case: str, line: str, answers: dict[str, Answer]) -> None:
    answer = answers[case]
    assert (answer.code, answer.out) == (2, "")
    assert re.fullmatch(f"sglang-pic: error: {line}", answer.err.splitlines()[-1])


def test_what_would_be_computed_follows_from_the_flags(answers: dict[str, Answer]) -> None:
    computed = "\n".join(answers["computed"].found["computed"])
    assert "hidden states of its prompt. (--enable-return-hidden-states)" in computed
    assert "Without a tokenizer (--skip-tokenizer-init) prompts are cut by content alone, and all" in computed
    lost = "\n".join(answers["no tokenizer"].found["computed"])
    assert re.search(r"Without a tokenizer \(\w+: .*\) prompts are cut by content alone, and all text after", lost)
    assert "tokenizer" not in "\n".join(answers["hopper"].found["computed"])


@pytest.mark.feature("deterministic inference")
@pytest.mark.parametrize("case", ["deterministic", "on policy"])
def test_with_deterministic_inference_a_request_opts_in(case: str, answers: dict[str, Answer]) -> None:
    """Whichever flag switches it on."""
    assert answers[case].code == 0
    (line,) = (line for line in answers[case].found["computed"] if "deterministic" in line)
    assert line.endswith(
        "only if it asks for mode auto: the default mode is off there. (--enable-deterministic-inference)"
    )


def test_without_a_model_only_what_is_installed_is_looked_at(answers: dict[str, Answer]) -> None:
    found = answers["no model"].found
    assert {one["area"] for one in found["findings"]} == {Area.SGLANG.value, Area.PACKAGE.value}
    assert (answers["no model"].code, found["refused"], found["computed"]) == (0, [], [])


def test_text_says_the_same_as_the_object(answers: dict[str, Answer]) -> None:
    lines = answers["text"].out.splitlines()
    assert lines[1] == "on h100"
    assert lines[-1].startswith("would start; start-up checks on the live model")
    assert "every function and class that the plugin uses, as tested" in answers["hopper"].found["contract"]
    for one in answers["hopper"].found["findings"]:
        assert any(re.match(rf"  {one['level']} .*: {re.escape(one['what'])} ", line) for line in lines), one


def test_this_machine_answers_for_itself(model_dir: Callable[[str], Path]) -> None:
    """Here that is a CPU, with the platform that comes with the plugin."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    model = str(model_dir("tiny-gqa"))
    cases = {"here": ([model, "--json"], ""), "late": ([model, "--json", "--card", "h100"], "")}
    (answers,) = forked(1, lambda _: ask(cases))
    assert answers["here"].found["machine"] == "this machine, --device cpu"
    assert "pic_cpu" in answers["here"].tested
    assert answers["late"].found["refused"] == [
        "--card h100: SGLang runs in this process already, on another platform."
    ]


def test_the_matrix_names_the_versions_that_are_pinned() -> None:
    """And SGLang in every version that has digests, as far as the contract of this commit is met there."""
    pins = dict(line.split("==") for line in (ROOT / "requirements-cpu.txt").read_text().split() if "==" in line)
    torch = re.search(r"^TORCH_VERSION := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    (brought,) = (each.removeprefix("torch==") for each in requires("sglang") or () if each.startswith("torch=="))
    for area, what in (
        (Area.PACKAGE, f"torch {brought}"),
        (Area.PACKAGE, f"triton {pins['triton']}"),
        (Area.PACKAGE, f"torch {torch[1]}"),
        *((Area.SGLANG, version) for version in known_versions()),
    ):
        entry = find(area, what)
        assert entry is not None, what
        assert entry.level.name == ("ADMITTED" if area is Area.SGLANG and what != BUILT_FOR else "TESTED")
    assert pins["sglang"] == BUILT_FOR
