"""All workloads by name, for `gen:` specs, error messages and the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pic_traces.errors import TraceError
from pic_traces.session import Session

from pic_generate.agent_meta import AgentMeta
from pic_generate.compact import Compact
from pic_generate.options import Options, parse_options
from pic_generate.random_text import RandomText
from pic_generate.reorder import Reorder
from pic_generate.session_writer import WriterFactory
from pic_generate.sysvar import SysVar
from pic_generate.tool_variants import ToolVariants


class Workload(NamedTuple):
    """A generator in the catalogue: one line on the text that changes and repeats, and the struct of its options."""

    summary: str
    kind: type[Options]


WORKLOADS = {
    "agent_meta": Workload("a header that changes with every call, before a body that never does", AgentMeta),
    "sysvar": Workload("a clock, statistics or a model name late in a long system prompt", SysVar),
    "compact": Workload("a summary takes the place of old history, the recent tail stays", Compact),
    "tool_variants": Workload("a tool list in a few versions: a wording, a tool more or less", ToolVariants),
    "reorder": Workload("long documents in another order in every call", Reorder),
    "random": Workload("nothing to reuse: what the feature costs", RandomText),
}
"""Every generator by the name in `gen:NAME`: four of Irminsul's, documents in other orders, and the control."""


def generate(spec: str) -> Iterator[Session]:
    """Yield the sessions of a generator spec, `gen:NAME?key=value&...`.

    Raises:
        TraceError: the name or an option is unknown, or a value is not allowed; raised before the first session.
    """
    name, _, query = spec.removeprefix("gen:").partition("?")
    if name not in WORKLOADS:
        known = "\n".join(f"  gen:{key}: {workload.summary}" for key, workload in WORKLOADS.items())
        raise TraceError(f"{spec}: no generator {name!r}; allowed are\n{known}")
    try:
        options = parse_options(query, WORKLOADS[name].kind)
        writers = WriterFactory(name, seed=options.seed, sessions=options.sessions, tokenizer=options.tokenizer)
    except TraceError as error:
        raise TraceError(f"{spec}: {error}") from error
    return options.write(writers)
