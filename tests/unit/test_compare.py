"""The arithmetic of a comparison on small handwritten records, its arms, its folder and its command line."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest
from pic_bench.compare import command
from pic_bench.compare.arms import build_arms, read_pic_config
from pic_bench.compare.counters import pic_counters
from pic_bench.compare.pairing import Pair, compare_arms, pair_records, summarize_arm
from pic_bench.compare.run_folder import COMPARISON, Config, ScenesConfig, make_scenes
from pic_bench.compare.summary import ArmKind, ArmSummary
from pic_bench.out_folder import claim_folder, write_json
from pic_bench.report.stats import merge_tokens, top_k_kl
from pic_traces.records import RequestRecord, Status, summarize

from sglang_pic.errors import ConfigError
from tests.unit.replay_records import record


def test_the_first_token_is_the_answer_s_else_the_likeliest_and_may_be_unknown() -> None:
    base = record(0, output_token_ids=[7, 8])
    assert Pair(base, record(0, output_token_ids=[7, 9])).same_first_token is True
    assert Pair(record(0), record(0)).same_first_token is True
    assert Pair(base, record(0, first_top_logprobs=None)).same_first_token is None


def test_warmup_and_other_prompts_are_no_pairs() -> None:
    base = [record(0, warmup=True), record(1), record(2)]
    arm = [record(0, warmup=True), record(1, prompt_key="another"), record(2)]
    assert [pair.base.call for pair in pair_records(base, arm)] == [2]
    assert compare_arms("stock", base, "pic", arm).prompts_differ == 1


def arm_of(records: list[RequestRecord]) -> ArmSummary:
    replayed = summarize(records, trace="t", model="m", planned=len(records))
    return summarize_arm(replayed, records, kind=ArmKind.PIC, ready_s=1.0, server_args=[], pic_counters={})


def test_arm_totals_count_answered_requests_only() -> None:
    records = [
        record(0),
        record(1, ttft_s=3.0, finished_at=4.0),
        record(2, status="failed", error="HTTP 500:\n boom"),
        record(3, status="skipped", reason="prompt of 9001 tokens + 16 output tokens > context of 8192"),
        record(4, status="skipped", reason="prompt of 9002 tokens + 16 output tokens > context of 8192"),
        record(0, warmup=True, ttft_s=99.0),
    ]
    arm = arm_of(records)
    assert (arm.requests, arm.failed, arm.skipped, arm.warmup_requests) == (3, 1, 2, 1)
    assert (arm.prompt_tokens, arm.prefix_hit_tokens, arm.computed_tokens) == (2000, 200, 1800)
    assert arm.ttft_s.p50 == 2.0
    assert arm.achieved_requests_per_s == 0.5
    assert arm.errors == {"HTTP 500: boom": 1}
    assert arm.skipped_reasons == {"prompt + 16 output tokens > context of 8192": 2}


def test_kl_bounds_a_token_that_the_other_list_lacks_by_its_smallest_probability() -> None:
    kl = top_k_kl({"a": math.log(0.5), "x": math.log(0.5)}, {"a": math.log(0.5), "b": math.log(0.3)})
    assert kl == pytest.approx(0.5 * math.log(0.5 / 0.5) + 0.5 * math.log(0.5 / 0.3))


def test_tokens_of_the_same_text_add_up() -> None:
    """Parts of a character all decode to the replacement character."""
    merged = merge_tokens([("\ufffd", math.log(0.25)), ("a", math.log(0.5)), ("\ufffd", math.log(0.25))])
    assert merged == pytest.approx({"\ufffd": math.log(0.5), "a": math.log(0.5)})


def test_arms_differ_in_exactly_what_they_should() -> None:
    names, config = ["stock", "pic", "pic-off", "stock-again", "pic"], '{"max_gaps": 8}'
    arms = build_arms(names, server_args=["--page-size", "16"], pic_config=config)
    stock, pic, off, again, second = arms
    assert [arm.name for arm in arms] == [*names[:4], "pic-2"]
    assert pic.server_args == (*stock.server_args, "--radix-cache-backend", "pic")
    assert off.server_args == second.server_args == pic.server_args
    assert again.server_args == stock.server_args
    assert {"--enable-cache-report", "--enable-metrics", "--page-size"} <= set(stock.server_args)
    assert pic.env == {"SGLANG_PIC_CONFIG": config}
    assert off.custom_params == {"pic": {"mode": "off"}}
    assert pic.custom_params == {}
    (again,) = build_arms(["stock-again"], server_args=["--file-storage-path", "s/{arm}"], pic_config=None)
    assert again.server_args[-1] == "s/stock-again", "each arm has a store of its own"
    assert stock.env["SGLANG_PIC_CONFIG"] is None
    loaded = set(str(stock.env["SGLANG_PLUGINS"]).split(","))
    assert loaded.isdisjoint({"pic", "pic_probe"}), "stock must not load the cache's plugin, nor its probe"
    assert off.kind is ArmKind.PIC_OFF


def test_pic_config_is_checked_before_any_server_starts(tmp_path: Path) -> None:
    good = tmp_path / "pic.json"
    good.write_text('{"max_gaps": 4}', "utf8")
    assert read_pic_config(None) is None
    assert read_pic_config(str(good)) == str(good.resolve())
    for bad in ('{"max_gapz": 4}', "{", str(tmp_path / "absent.json")):
        with pytest.raises(ConfigError):
            read_pic_config(bad)


def test_counters_are_summed_over_ranks_and_keep_the_labels_that_matter() -> None:
    page = """# HELP sglang:pic_runs_total Runs.
sglang:pic_runs_total{model_name="m",tp_rank="0"} 3.0
sglang:pic_runs_total{model_name="m",tp_rank="1"} 3.0
sglang:pic_fallbacks_total{model_name="m",reason="no, \\"slots\\""} 2.0
sglang:pic_plan_seconds_bucket{le="0.1"} 9.0
sglang:pic_plan_seconds_sum 0.5
sglang:num_requests_total 7.0
sglang:spec_verify_calls_total{model_name="m"} 8.0
"""
    assert pic_counters(page) == {
        'sglang:pic_fallbacks_total{reason=no, "slots"}': 2.0,
        "sglang:pic_plan_seconds_sum": 0.5,
        "sglang:pic_runs_total": 6.0,
        "sglang:spec_verify_calls_total": 8.0,
    }


def test_the_scenes_of_an_earlier_comparison_are_overwritten_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for name in ("run/clock", "run/mine", "other"):
        (tmp_path / name).mkdir(parents=True)
    write_json(folder / "config.json", ScenesConfig(scenes=["clock", "../other", "absent"]))
    claim_folder(folder, COMPARISON, force=True)
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert (tmp_path / "other").is_dir()


def test_only_an_earlier_comparison_is_overwritten_and_only_with_force(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    claim_folder(folder, COMPARISON, force=False)
    write_json(folder / "config.json", Config(trace="t", model="m", arms=["stock"]))
    (folder / "arms" / "stock").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine", "utf8")
    with pytest.raises(ConfigError, match="--force"):
        claim_folder(folder, COMPARISON, force=False)
    claim_folder(folder, COMPARISON, force=True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="holds no earlier comparison"):
        claim_folder(folder, COMPARISON, force=True)
    assert (folder / "notes.txt").exists()


def test_every_scene_has_a_folder_of_its_own(tmp_path: Path) -> None:
    config = Config(trace="t", model="m", arms=["stock"])
    traces = ["clock:3@logs/My Log.jsonl.gz", "My-Log", "gen:random?calls=2", "gen:random?calls=2", "arms", "../.."]
    scenes = make_scenes(traces, tmp_path, config)
    names = ["clock-3-my-log", "my-log", "gen-random-calls-2", "gen-random-calls-2-2", "arms-2", "trace"]
    assert [scene.name for scene in scenes] == names
    assert [scene.folder for scene in scenes] == [tmp_path / name for name in names]
    assert [scene.config.trace for scene in scenes] == traces
    assert [scene.namespace for scene in scenes] == names
    (only,) = make_scenes(["t"], tmp_path, config)
    assert (only.folder, only.config, only.namespace) == (tmp_path, config, None)


def test_words_after_dashes_go_to_the_servers() -> None:
    parser = argparse.ArgumentParser()
    verb = parser.add_subparsers().add_parser("compare")
    command.add_arguments(verb)
    line = "compare t.jsonl u.jsonl --model m --server-arg=--tp-size=2 --out o -- --page-size 16 --out x"
    args = parser.parse_args(line.split())
    assert args.traces == ["t.jsonl", "u.jsonl"]
    assert args.server_args == ["--page-size", "16", "--out", "x"]
    assert args.server_arg == ["--tp-size=2"]
    assert args.out == Path("o")
    assert parser.parse_args(["compare", "t.jsonl", "--model", "m", "--out", "o"]).server_args == []


def test_records_of_every_status_have_a_place_in_the_totals() -> None:
    """A status that `summarize_arm` does not know would silently leave requests out."""
    records = [record(number, status=status.value) for number, status in enumerate(Status)]
    arm = arm_of(records)
    assert arm.requests + arm.skipped == len(Status)
