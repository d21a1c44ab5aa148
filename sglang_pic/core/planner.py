"""Plans one prompt: find the runs, guard them against changed fields, fit them to the prompt, and price the whole.

    find    `find.py`: where a known chunk may end, and with `equal_spans.py` the longest equal span around it that is
            worth a run: `below_min_run`, `sink`, `tail`, `budget`, `generation`, `donor_evicted`, `position_step`
    guard   `guard.py`: what may depend on a field that has another value here is computed: `changed_field`,
            `generation`, `budget`
    fit     `fit.py`: no run in another order, too near the end after another text, through an image, or beyond the
            request's limits: `reordered`, `tail`, `max_runs`, `max_gaps`, `below_min_run`
    price   here: nothing is spliced if computing all of it takes no longer: `cost_gate`, as for single runs in *find*

Each stage takes the runs of the one before it and gives parts of them; all read one `Query`. Reasons count runs that
were left out; tokens of a seam, and those by which a run was shortened, have none.
"""

from __future__ import annotations

import msgspec

from sglang_pic.core.find import Finder
from sglang_pic.core.fit import Fitter
from sglang_pic.core.guard import Guard
from sglang_pic.core.plan import DropReason, Plan
from sglang_pic.core.query import Query


def make_plan(query: Query) -> tuple[Plan, int]:
    """The plan of a prompt, and its cost in tokens compared, which is O(tokens after the prefix) in any case."""
    guard = Guard(query)
    finder = Finder(query, guard)
    found = finder.runs()
    guarded = guard.protect(found)
    plan = Plan(
        prefix_len=query.prefix_len,
        end=query.end,
        runs=tuple(Fitter(query).fit(guarded, found)),
        changed_fields=guarded.changed_fields,
        guarded=guarded.spans,
    )
    if plan.runs and not _saves(plan, query):
        query.dropped[DropReason.COST_GATE] += len(plan.runs)
        plan = msgspec.structs.replace(plan, runs=())
    return msgspec.structs.replace(plan, dropped=dict(+query.dropped)), finder.work


def _saves(plan: Plan, query: Query) -> bool:
    """Whether splicing saves time, by the measured costs; True without them."""
    options, rows = query.options, query.rows
    if options.cost is None:
        return True
    num_fetched = sum(rows.num_to_fetch(run.donor, run.donor_start, run.donor_end) for run in plan.runs)
    before = {"num_before": options.num_before, "reads_before": options.reads_before}
    return plan.saved_us(options.cost, num_fetched=num_fetched, **before) > 0
