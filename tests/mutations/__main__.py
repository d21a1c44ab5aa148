"""Removes, one at a time, code that keeps an invariant of the design, and shows the test that fails then.

    python -m tests.mutations          all of them
    python -m tests.mutations 1 9      those of invariants 1 and 9
    python -m tests.mutations --page   write the list in sglang_pic/README.md, and run nothing

Every mutation of the table is made in a copy of the tree, in a temporary folder. First the named tests run without a
mutation: they have to pass. Each run is a fork of this process, which has SGLang in memory already.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.mutations import PAGE, ROOT, Mutation, read_table, render

_COPIED = ("sglang_pic", "kernels", "traces", "bench", "tests")
_PATHS = (".", "kernels", "traces", "bench")
_OURS = ("sglang_pic", "pic_", "tests")
_LIMIT_S = 900
_CONTEXT = multiprocessing.get_context("fork")


def main() -> int:
    """Print a line for each mutation; 1 if one survives or cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("invariants", nargs="*", type=int, metavar="N", help="only of these invariants")
    parser.add_argument("--page", action="store_true", help="write the list in sglang_pic/README.md, and run nothing")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(render(PAGE.read_text("utf8")), "utf8")
        return 0
    table = read_table()[1]
    if unknown := {*args.invariants} - {each.invariant for each in table}:
        parser.error(f"{unknown}: must be numbers of invariants, as {PAGE.name} lists them")
    mutations = [each for each in table if not args.invariants or each.invariant in args.invariants]
    _load_sglang()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = Path(folder)
        _copy_tree(root)
        code, said, seconds = _run(root, sorted({mutation.test for mutation in mutations}))
        if code != 0:
            print(f"the tests do not pass as the code is:\n{said[-4000:]}", file=sys.stderr)
            return 1
        print(f"{len(mutations)} mutations; their tests pass without any in {seconds:.0f} s", flush=True)
        bad = [mutation for mutation in mutations if not _try(root, mutation)]
    print(f"{len(mutations) - len(bad)} killed, {len(bad)} not")
    return 1 if bad else 0


def _try(root: Path, mutation: Mutation) -> bool:
    """Whether the test fails with the mutation."""
    before = mutation.apply(root)
    try:
        code, said, seconds = _run(root, [mutation.test])
    finally:
        (root / mutation.file).write_text(before, "utf8")
    # 1 is a failed test; a mutation that breaks an import or hangs shows nothing.
    verdict = {0: "SURVIVED", 1: "killed"}.get(code, f"BROKEN (exit status {code})")
    print(f"{mutation.invariant:>2}  {verdict:<8} {seconds:4.0f} s  {mutation.what}  [{mutation.test}]", flush=True)
    if code not in (0, 1):
        print(said[-2000:], file=sys.stderr)
    return code == 1


def _copy_tree(root: Path) -> None:
    """The sources and the tests; SGLang and all else come from this environment."""
    for folder in _COPIED:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.gz", "results"))
    shutil.copy(ROOT / "pyproject.toml", root)


def _load_sglang() -> None:
    """What most of the tests import, and what takes longest."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        import sglang.srt.managers.schedule_policy  # noqa: F401
        import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401
        import sglang.srt.models.deepseek_v2  # noqa: F401


def _run(root: Path, tests: list[str]) -> tuple[int, str, float]:
    """The exit status of pytest in the copy, what it said, and how long it took."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    started = time.monotonic()
    process = _CONTEXT.Process(target=_in_copy, args=(root, tests, theirs))
    process.start()
    theirs.close()
    code, said = ours.recv() if ours.poll(_LIMIT_S) else (124, f"{tests} took longer than {_LIMIT_S} s")
    process.kill()
    process.join()
    return code, said, time.monotonic() - started


def _in_copy(root: Path, tests: list[str], answer: Connection) -> None:
    paths, replaced = ([str(top / folder) for folder in _PATHS] for top in (root, ROOT))
    os.chdir(root)
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    # The source that was mutated, and nothing that was compiled before.
    os.environ["SGLANG_PIC_LOOPS"] = "python"
    sys.dont_write_bytecode = True
    sys.path[:] = [*paths, *(path for path in sys.path if path and path not in replaced)]
    for name in [name for name in sys.modules if name.startswith(_OURS)]:
        del sys.modules[name]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        # SGLang has imported what plugins of pytest would rewrite.
        quiet = ["-q", "-x", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider"]
        code = pytest.main([*quiet, "--timeout=0", *tests])
    answer.send((int(code), said.getvalue()))


if __name__ == "__main__":
    sys.exit(main())
