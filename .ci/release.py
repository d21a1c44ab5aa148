"""Cuts a release: `make release VERSION=1.2.3`, with `ARGS=--dry-run` to see what it would do.

Checks the tree, the version and the changelog, and says all that is wrong at once. Then sets the version, dates the
changelog's section, runs the lint, builds the sdists and the wheels from them, tests these in an empty environment,
commits and tags. Pushing the tag is left to the maintainer.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULE, CHANGELOG = ROOT / "sglang_pic" / "__init__.py", ROOT / "CHANGELOG.md"
BENCH = ROOT / "bench" / "pyproject.toml"
_VERSION = re.compile(r'(?<=^__version__ = ")[^"]+(?="$)', re.MULTILINE)
_BENCH_VERSION = re.compile(r'(?<=^version = ")[^"]+(?=")|(?<="sglang-pic\[census\]==)[^"]+(?=")', re.MULTILINE)
_UNRELEASED = re.compile(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Cut the release, or say why not."""
    parser = argparse.ArgumentParser(prog="make release VERSION=1.2.3", description=__doc__.splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true", help="neither commit nor tag, and put the files back")
    args = parser.parse_args()
    if wrong := list(problems(args.version)):
        print(*(f"release: {line}" for line in wrong), sep="\n", file=sys.stderr)
        return 1
    before = {path: path.read_text("utf8") for path in (MODULE, BENCH, CHANGELOG)}
    MODULE.write_text(_VERSION.sub(args.version, before[MODULE]), "utf8")
    BENCH.write_text(_BENCH_VERSION.sub(args.version, before[BENCH]), "utf8")
    CHANGELOG.write_text(dated(before[CHANGELOG], args.version, datetime.now(UTC).date().isoformat()), "utf8")
    done = False
    try:
        for command in ("make lint", "make wheel", "make test-wheel"):
            subprocess.run(command.split(), cwd=ROOT, check=True)
        done = not args.dry_run
    except subprocess.CalledProcessError as error:
        print(f"release: `{' '.join(error.cmd)}` failed; nothing was changed", file=sys.stderr)
        return 1
    finally:
        if not done:
            for path, text in before.items():
                path.write_text(text, "utf8")
    if done:
        git("commit", "-qam", f"Release {args.version}")
        git("tag", "-a", f"v{args.version}", "-m", f"sglang-pic {args.version}")
    print(f"release: v{args.version} is {'tagged; push it' if done else 'ready'}; dist/ has the wheels and the sdists")
    return 0


def problems(version: str) -> Iterator[str]:
    """What speaks against a release of that version, in one line each."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"VERSION={version!r}: must be MAJOR.MINOR.PATCH, such as 1.2.3"
        return
    if changes := git("status", "--porcelain"):
        yield f"the tree has changes: {', '.join(line[3:] for line in changes.splitlines()[:5])}; commit them first"
    tags = [tag.removeprefix("v") for tag in git("tag", "--list", "v*.*.*").splitlines()]
    newest = max((*tags, "0.0.0"), key=numbers)
    if numbers(version) <= numbers(newest):
        yield f"VERSION={version!r}: v{newest} is tagged already; choose a higher one"
    (current,) = _VERSION.findall(MODULE.read_text("utf8"))
    if numbers(version) < numbers(current):
        yield f"VERSION={version!r}: sglang_pic/__init__.py is at {current} already; choose that or a higher one"
    changelog = CHANGELOG.read_text("utf8")
    section = _UNRELEASED.search(changelog)
    if section is None or not re.search("^- ", section[1], re.MULTILINE):
        yield "CHANGELOG.md: [Unreleased] lists nothing; say what changed for users"
    contract = (ROOT / "sglang_pic" / "adapter" / "sglang" / "contract.py").read_text("utf8")
    (built_for,) = re.findall(r'^BUILT_FOR = "(.+)"$', contract, re.MULTILINE)
    if section is None or f"\n| {built_for} |" not in section[1]:
        yield f"CHANGELOG.md: `Tested with` of [Unreleased] has no row of SGLang {built_for}; run `make tested`"


def dated(changelog: str, version: str, date: str) -> str:
    """The changelog with its unreleased section under the version's name and the date."""
    return changelog.replace("## [Unreleased]\n", f"## [Unreleased]\n\n## [{version}] - {date}\n", 1)


def numbers(version: str) -> tuple[int, ...]:
    """A version as it is ordered."""
    return tuple(map(int, version.split(".")))


def git(*words: str) -> str:
    """What a command of git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())
