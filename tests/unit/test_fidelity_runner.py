"""A run's folder: what is refused, what is gone on with; the sizes and arguments of the command."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest
from pic_bench.fidelity.command import _config, add_arguments
from pic_bench.fidelity.config import Config, default_sizes
from pic_bench.fidelity.folder import claim_run
from pic_bench.fidelity.questions import GENERATED
from pic_bench.fidelity.record import Experiment
from pic_bench.fidelity.runner import chosen_questions
from pic_bench.summary import write_json

from sglang_pic.errors import ConfigError


def parse(*words: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return _config(parser.parse_args(["--model", "m", "--out", "o", *words]))


def test_arguments_become_a_configuration() -> None:
    whole = parse()
    assert whole.sizes == default_sizes()
    assert whole.experiments == tuple(Experiment)
    assert whole.dtypes == ("float32", "bfloat16")
    assert whole.policies[0] == "default"
    quick = parse("--quick", "--prompts", "3", "--blocks", "2,16", "--dtype", "float32", "--server-arg=--page-size 16")
    assert (quick.sizes.prompts, quick.sizes.blocks, quick.dtypes) == (3, (2, 16), ("float32",))
    assert quick.server_args == ("--page-size", "16")
    assert Experiment.TRACE not in quick.experiments
    assert parse("--experiment", "trace", "--quick").experiments == (Experiment.TRACE,)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--blocks", "0"], "blocks"),
        (["--blocks", "17"], "blocks"),
        (["--seams", "80"], "seams"),
        (["--shifts", "0,1"], "shifts"),
        (["--prompts", "0"], "prompts"),
        (["--policy", "exact"], "policy"),
        (["--policy", "default", "--experiment", "grid"], "--experiment trace"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(*words)


def test_a_run_that_is_broken_off_has_as_many_questions_of_each_source() -> None:
    sources = [question.source for question in chosen_questions(parse("--questions", "3"))]
    assert len(set(sources)) == len(GENERATED) > 1
    assert sources == 3 * sources[: len(GENERATED)]


def test_a_folder_is_new_or_an_earlier_run_that_is_spoken_of(tmp_path: Path) -> None:
    config, folder = parse("--quick"), tmp_path / "run"
    claim_run(folder, config, resume=False, force=False)
    write_json(folder / "config.json", config)
    (folder / "probes.jsonl").write_bytes(b'{"whole": 1}\n{"cut')
    with pytest.raises(ConfigError, match="--resume or --force"):
        claim_run(folder, config, resume=False, force=False)
    with pytest.raises(ConfigError, match="another run than this command: seed is 0 there and 1 here"):
        claim_run(folder, msgspec.structs.replace(config, seed=1), resume=True, force=False)
    claim_run(folder, config, resume=True, force=False)
    assert (folder / "probes.jsonl").read_bytes() == b'{"whole": 1}\n', "a record must begin on a line of its own"
    claim_run(folder, config, resume=False, force=True)
    assert list(folder.iterdir()) == []


def test_a_folder_of_something_else_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("text")
    with pytest.raises(ConfigError, match="no earlier fidelity run"):
        claim_run(tmp_path, parse(), resume=False, force=True)
    assert (tmp_path / "mine.txt").exists()
    with pytest.raises(ConfigError, match="is a file"):
        claim_run(tmp_path / "mine.txt", parse(), resume=False, force=True)
