"""Fuzzes every target for minutes, led by coverage: `python -m tests.fuzz.run --seconds 60 --out runs/fuzz`.

Each target is fuzzed twice, by atheris on plain bytes and by atheris on Hypothesis's documents, each in a process of
its own that ends at the first crash. Prints one JSON line: what was tried, what was reached, and the inputs that
crashed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_KINDS = ("bytes", "documents")
_INSTRUMENTED = ["pic_traces", "sglang_pic"]
_SEEDS: dict[str, list[bytes]] = {
    "trace": [
        b'\x00{"session_id":"a","messages":[{"role":"user","content":"x"},{"role":"assistant"}],"turns":[1]}\n',
        b'\x01[{"request":{"messages":[{"role":"user","content":"x"}],"user":"u"},"response":"y"}]',
        b'\x06{"messages":[{"role":"user"}],"tools":[{}],"session_id":3}\n',
    ],
    "blocks": [
        b'{"timestamp":1,"input_length":1000,"output_length":3,"hash_ids":[1,2]}\n',
        b'{"id":"a","block_size":64,"requests":[{"t":0,"in":128,"out":3,"hash_ranges":[[0,2]]},{"requests":[]}]}\n',
    ],
    "records": [
        b'{"session_id":"a","call":0,"status":"ok","prompt_key":"k","num_messages":1,"scheduled_at":0,"finished_at":1}'
    ],
    "stream": [
        b'data: {"id":"1","choices":[{"delta":{"content":"x"},"logprobs":{"content":[{"logprob":-1,"top_logprobs":'
        b'[{"token":"x","logprob":-1}]}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}\n\ndata: [DONE]\n\n',
        b'data: {"error":{"message":"bad","code":400}}\r\n\r\n',
    ],
    "options": [b'{"mode":"off","seam_tokens":8,"pin":"a"}', b'{"pic":{"edit":"notes","skills":"near","unpin":"b"}}'],
    "config": [
        b'{"core":{"seam_tokens":1,"chunk_avg_tokens":16},"cost_gate":"off","audit_rate":0.5}',
        b'{"cost_gate":{"computed_token_us":1,"spliced_token_us":1,"gap_us":1}}',
    ],
}


def _fuzz(target: str, kind: str, folder: Path, seconds: int) -> None:
    """In a process of its own; never returns."""
    import atheris

    with atheris.instrument_imports(include=_INSTRUMENTED, enable_loader_override=False):
        from tests.fuzz.documents import documents
        from tests.fuzz.readers import TARGETS
    run = TARGETS[target]
    if kind == "documents":
        from hypothesis import HealthCheck, given, settings

        @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(documents(target))
        def of_document(data: bytes) -> None:
            TARGETS[target](data)

        run = of_document.hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(_SEEDS[target] if kind == "bytes" else []):
        (corpus / f"seed-{number}").write_bytes(seed)
    flags = [f"-max_total_time={seconds}", "-max_len=16384", "-timeout=10", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={folder}/", str(corpus)], run)
    atheris.Fuzz()


def _run(target: str, kind: str, out: Path, seconds: int) -> dict[str, Any]:
    folder = out / f"{target}-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.run", "--only", target, "--kind", kind]
    command += ["--seconds", str(seconds), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    (folder / "log").write_text(done.stderr + done.stdout)
    crashes = sorted(path.name for path in folder.iterdir() if re.match("crash|timeout|oom", path.name))
    if done.returncode and not crashes:
        raise SystemExit(f"{target}, {kind}: did not run: {done.stderr[-2000:]}")

    def most(pattern: str) -> int:
        return max(map(int, re.findall(pattern, done.stderr, re.M)), default=0)

    reached = {"inputs": most(r"^(?:#|Done )(\d+)"), "edges": most(r"cov: (\d+)")}
    return {"target": target, "kind": kind, **reached, "seconds": seconds, "crashes": crashes}


def main() -> int:
    """Fuzz; 1 where something crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target and kind of input")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--only", choices=_SEEDS, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=_KINDS, default="bytes", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        _fuzz(args.only, args.kind, args.out, args.seconds)
    found = [_run(target, kind, args.out, args.seconds) for target in _SEEDS for kind in _KINDS]
    num_crashes = sum(len(each["crashes"]) for each in found)
    print(json.dumps({"inputs": sum(each["inputs"] for each in found), "crashes": num_crashes, "targets": found}))
    return int(num_crashes > 0)


if __name__ == "__main__":
    sys.exit(main())
