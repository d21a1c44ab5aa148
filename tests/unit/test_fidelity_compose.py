"""COMPOSE: skills keep their ids in every order, runs end where skills end, and the report says what was spliced."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from fidelity_records import Asked, StandIn, probe, recorded
from pic_bench.fidelity.arms import EXACT, FULL
from pic_bench.fidelity.cases.case import MIN_HEADER, Case, Job
from pic_bench.fidelity.cases.compose import ORDERS_PER_LIBRARY, SEAMS, compose_jobs, other_orders
from pic_bench.fidelity.cases.text import ModelText, TextPool, trace_texts
from pic_bench.fidelity.compared import make_cells, make_panels
from pic_bench.fidelity.config import QUICK_SIZES
from pic_bench.fidelity.measure import Unrealised, check_realised, measure
from pic_bench.fidelity.pictures import by_skills
from pic_bench.fidelity.record import Donors, Experiment, append_lines
from pic_bench.fidelity.report import write_report
from pic_bench.fidelity.summary import Thresholds
from pic_bench.fidelity.tables import skills_table
from pic_bench.fidelity.target import Recorded

from sglang_pic.errors import ConfigError

SIZES = msgspec.structs.replace(QUICK_SIZES, skills=(1, 2, 4), compositions=8)


@pytest.fixture(scope="module")
def text(model_dir: Callable[[str], Path]) -> ModelText:
    return ModelText(model_dir("smollm2"))


@pytest.fixture(scope="module")
def pool(text: ModelText) -> TextPool:
    return TextPool("sample", trace_texts("sample:opendevin"), text)


@pytest.fixture(scope="module")
def jobs(text: ModelText, pool: TextPool) -> list[Job]:
    return list(compose_jobs(SIZES, text, pool, 0))


def test_every_skill_has_the_ids_that_it_was_compiled_with(jobs: list[Job]) -> None:
    assert [sum(len(job.case.blocks) == count for job in jobs) for count in (1, 2, 4)] == [8, 8, 8]
    for case in (job.case for job in jobs):
        assert case.warm_len >= MIN_HEADER
        assert case.blocks[0].start == case.warm_len
        assert all(before.end == after.start for before, after in zip(case.blocks, case.blocks[1:], strict=False))
        skills = [case.prompt[start:end] for start, end in case.blocks]
        header = case.prompt[: case.warm_len]
        for skill in skills:
            assert SIZES.skill_tokens[0] <= len(skill) <= SIZES.skill_tokens[1]
            (alone,) = [
                donor for donor in case.donors[Donors.ISOLATED] if donor[case.warm_len :][: len(skill)] == skill
            ]
            assert alone[: case.warm_len] == header
            # A run that grew beyond the skill would splice what stands behind it.
            behind = {donor[case.warm_len + len(skill)] for donor in (alone, *case.donors.get(Donors.CONTEXT, ()))}
            assert case.prompt[case.blocks[-1].end] not in behind
        if len(skills) > 1:
            (together,) = case.donors[Donors.CONTEXT]
            assert together[: len(header)] == header
            assert sorted(chain(*skills)) == sorted(together[len(header) :][: sum(map(len, skills))])
            assert together[len(header) :][: sum(map(len, skills))] != list(chain(*skills)), "another order"


def test_prompts_of_a_library_differ_in_order_and_share_their_donors(jobs: list[Job], text: ModelText) -> None:
    assert len({job.case.name for job in jobs}) == len({tuple(job.case.prompt) for job in jobs}) == len(jobs)
    four = [job.case for job in jobs if len(job.case.blocks) == 4]
    assert [case.library for case in four] == ["compose-4-0"] * ORDERS_PER_LIBRARY + ["compose-4-1"] * 2
    assert all(case.donors == four[0].donors for case in four[:ORDERS_PER_LIBRARY])
    assert four[0].donors != four[-1].donors
    assert {job.case.library for job in jobs if len(job.case.blocks) == 1} == {f"compose-1-{n}" for n in range(8)}
    assert text.text(four[0].prompt).count("## Skill ") == 4


def test_a_single_skill_is_compiled_one_way_and_others_two(jobs: list[Job]) -> None:
    for job in jobs:
        kinds = [Donors.ISOLATED] if len(job.case.blocks) == 1 else [Donors.ISOLATED, Donors.CONTEXT]
        assert job.arms[:2] == (FULL, EXACT)
        assert [(arm.donors, arm.seam_tokens) for arm in job.arms[2:]] == [(k, seam) for k in kinds for seam in SEAMS]


@pytest.mark.parametrize(("count", "wanted", "found"), [(1, 6, 1), (2, 6, 1), (3, 6, 5), (16, 24, 24)])
def test_orders_are_different_and_not_the_librarys_own(count: int, wanted: int, found: int) -> None:
    orders = other_orders(count, wanted, random.Random(3))
    assert len(orders) == len(set(orders)) == found
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert (tuple(range(count)) in orders) == (count == 1)


def test_numbers_of_skills_that_do_not_fit_are_left_out_or_refused(text: ModelText, pool: TextPool) -> None:
    long = msgspec.structs.replace(SIZES, skill_tokens=(100, 600), skills=(1, 16))
    assert {len(job.case.blocks) for job in compose_jobs(long, text, pool, 0)} == {1}
    with pytest.raises(ConfigError, match="at 9000 tokens each none"):
        next(compose_jobs(msgspec.structs.replace(long, skill_tokens=(100, 9000)), text, pool, 0))
    with pytest.raises(ConfigError, match="skill_tokens"):
        msgspec.structs.replace(SIZES, skill_tokens=(50, 400))


def test_a_seam_may_be_left_out_between_skills_and_nothing_else_is_spliced(jobs: list[Job]) -> None:
    job = next(job for job in jobs if len(job.case.blocks) == 4)
    case, arm = job.case, job.arms[-1]
    first, last = case.blocks[0].start, case.blocks[-1].end
    check_realised(case, arm, recorded([(first, last)]), 1)
    with pytest.raises(Unrealised, match="2 tokens outside"):
        check_realised(case, arm, recorded([(first, last + 2)]), 1)


class Server(StandIn):
    """Notes what is pinned, and splices all skills but for controls."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        self.pinned: dict[tuple[str, str], list[int]] = {}

    def compute(self, tokens: list[int], *, key: str, off: bool = False, pin: str | None = None) -> None:
        if pin is not None:
            assert not off
            self.pinned[key, pin] = tokens

    def answer(self, asked: Asked) -> Recorded:
        blocks = self._case.blocks
        prefix = len(asked.prompt) - 1 if asked.arm == EXACT else self._case.warm_len
        return recorded([] if asked.arm.is_control else [(blocks[0].start, blocks[-1].end)], prefix=prefix)


def test_skills_are_pinned_where_the_prompts_of_their_library_find_them(jobs: list[Job], text: ModelText) -> None:
    first, second = [job for job in jobs if job.case.library == "compose-4-0"][:2]
    servers = [Server(job.case) for job in (first, second)]
    for job, server in zip((first, second), servers, strict=True):
        probes = measure(job, server, text, dtype="float32", page_size=1)
        assert [p.chunk_hit_tokens == p.block_tokens for p in probes] == [not arm.is_control for arm in job.arms]
        spliced = [asked for asked in server.asked if not asked.arm.is_control]
        assert {asked.donors_from for asked in spliced} == {key for key, _ in server.pinned}
        assert all(asked.arm.options == {"skills": "near"} for asked in spliced)
        assert len(server.pinned) == 4 + 1
    assert servers[0].pinned == servers[1].pinned


def test_the_report_says_what_share_of_the_skills_is_spliced(tmp_path: Path) -> None:
    common = {"experiment": Experiment.COMPOSE, "block_tokens": 500, "prefix_hit_tokens": 60}
    arms = [("full", Donors.NONE, 0.0, 0), ("exact", Donors.NONE, 1e-9, 0)]
    for kind in (Donors.ISOLATED, Donors.CONTEXT):
        arms += [("seam-0", kind, 0.2, 500), ("seam-32", kind, 0.05, 450)]
    probes = [
        probe(
            arm=arm,
            donors=kind,
            num_blocks=count,
            prompt=f"c-{count}-{n % 2}-{n}",
            kl=kl,
            chunk_hit_tokens=hit,
            **common,
        )
        for count in (2, 16)
        for n in range(4)
        for arm, kind, kl, hit in arms
    ]
    cells = make_cells(make_panels(probes, Thresholds())[0], Thresholds())
    rows = skills_table(cells).rows
    assert [row[:5] for row in rows[:2]] == [["2 skills", w, "32", "4", "90.0 %"] for w in ("alone", "together")]
    assert [row[4] for row in rows] == ["90.0 %"] * 4 + ["100 %"] * 4
    assert [row[5] for row in rows[:2]] == [".050 [.050, .050]", ".050 [.050, .050]"]
    one = make_cells(make_panels([p for p in probes if p.unit == "c-16-0"], Thresholds())[0], Thresholds())
    assert skills_table(one).rows[0][5:] == [".050", ".050", "100 %"], "one library has no interval"
    drawn = by_skills(cells).drawing.body
    assert all(name in drawn for name in ("alone, seam 0", "alone, seam 32", "together, seam 0", "together, seam 32"))
    append_lines(tmp_path / "probes.jsonl", probes)
    write_report(tmp_path)
    assert "| 16 skills | together |   32 |   4 |                90.0 % |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "plot-skills-float32-sample.svg").exists()
