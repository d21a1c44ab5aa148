"""`gen:repoagent`: a document for every function of a repository, each from a fresh prompt.

The shape of RepoAgent (arXiv:2402.16667): a fixed instruction, the project's tree with a mark at the function, its path
and code, the code of what it calls and of what calls it, and the wish for a document. So the code of a function stands
in its own prompt, in those of its callers and in those of its callees, at another place in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta
from pic_traces.session import Session

from pic_generate.options import Options
from pic_generate.studio import Draft, Studio

_IN_A_FILE = 4  # functions


@dataclass(slots=True)
class _Function:
    name: str
    path: str
    code: str
    calls: Sequence[_Function]
    called_by: list[_Function] = field(default_factory=list)


class RepoAgent(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `gen:repoagent`; lengths in tokens."""

    instruction: Annotated[int, Meta(ge=1, description="length of the instruction before the tree")] = 120
    form: Annotated[int, Meta(ge=1, description="length of what is said of a document's form, at the end")] = 120
    code: Annotated[int, Meta(ge=20, description="length of a function, half as much to half as much again")] = 110
    related: Annotated[
        int, Meta(ge=0, description="a function calls so many at most, and so many at most of its callers are shown")
    ] = 3
    answer: Annotated[int, Meta(ge=1, description="length of a document")] = 120
    calls: Annotated[
        int, Meta(ge=1, description="LLM calls of a session, which has a repository of so many functions")
    ] = 40
    sessions: Annotated[int, Meta(ge=1, description="number of sessions")] = 2

    def write(self, studio: Studio) -> Iterator[Session]:
        shared = studio.writer("repoagent prompt")
        instruction, form, wish = shared.prose(self.instruction), shared.prose(self.form), shared.prose(12)
        for draft in studio.drafts():
            asked = draft.add({"role": "user", "content": wish})
            functions = self._repository(draft)
            for function in functions:
                parts = [instruction, _tree(functions, function), *self._shown(function), form]
                system = draft.add({"role": "system", "content": "\n\n".join(parts)})
                draft.call([system, asked], draft.message("assistant", self.answer))
            yield draft.session()

    def _repository(self, draft: Draft) -> list[_Function]:
        """Functions of which each calls some of the earlier ones, so that they are documented before it."""
        found: list[_Function] = []
        path = ""
        for number in range(self.calls):
            if number % _IN_A_FILE == 0:
                path = draft.path()
            calls = draft.rng.sample(found, min(len(found), draft.rng.randint(0, self.related)))
            name, length = draft.name(), draft.rng.randint(self.code // 2, self.code * 3 // 2)
            code = draft.function(name, [other.name for other in calls], length)
            found.append(_Function(name, path, code, calls))
            for other in calls:
                other.called_by.append(found[-1])
        return found

    def _shown(self, function: _Function) -> Iterator[str]:
        """A function with all that a document of it is written from."""
        yield f"File: {function.path}\nFunction: {function.name}\nCode:\n{function.code}"
        for title, others in (("It calls", function.calls), ("It is called by", function.called_by[: self.related])):
            for other in others:
                yield f"{title} {other.name} of {other.path}:\n{other.code}"


def _tree(functions: Sequence[_Function], marked: _Function) -> str:
    """The files of a repository with their functions, one of them marked."""
    lines = []
    for path in dict.fromkeys(function.path for function in functions):
        inside = (function for function in functions if function.path == path)
        lines += [path, *(f"  {function.name}{' *' if function is marked else ''}" for function in inside)]
    return "\n".join(lines)
