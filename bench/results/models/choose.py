"""Cuts recorded sessions to what a CPU can serve: `python choose.py MODEL_FOLDER TRACES OUT`.

Of each set the sessions in a seeded order, cut before the first prompt that is too long. The rule looks at numbers of
calls and tokens alone, and of OpenDevin takes each test once, because its five commits repeat one another.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

from pic_traces.encode import load_encoder
from pic_traces.source import load

# File, longest prompt, most calls of a session, sessions, fewest calls; tau-bench without its tools, of 3,000 tokens.
SETS = {
    "opendevin": ("opendevin_integration.jsonl.gz", 1600, 6, 10, 3),
    "chatdev": ("chatdev_warehouse.jsonl.gz", 1500, 6, 7, 4),
    "taubench": ("taubench_airline_gpt4o.jsonl.gz", 2000, 5, 7, 4),
    "miniswe": ("miniswe_deepseek.jsonl.gz", 2200, 4, 12, 2),
}


def main(model: str, traces: str, out: str) -> None:
    """Write a file for every set."""
    encoder = load_encoder(model)
    for name, (file, max_tokens, max_calls, num_sessions, min_calls) in SETS.items():
        with gzip.open(Path(traces) / file, "rt", encoding="utf8") as stream:
            records = [json.loads(line) for line in stream]
        if name == "taubench":
            for record in records:
                record.pop("tools", None)
        path = Path(out) / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        drawn = list(zip(records, load(path), strict=True))
        random.Random(0).shuffle(drawn)
        chosen: dict[str, object] = {}
        for record, session in drawn:
            test = (record.get("meta") or {}).get("agent_and_test") or record["session_id"]
            num_calls = 0
            for call in session.calls():
                if num_calls == max_calls or len(encoder.encode(call).tokens) > max_tokens:
                    break
                num_calls += 1
            if num_calls >= min_calls and test not in chosen and len(chosen) < num_sessions:
                for key in ("turns", "prompts", "t", "usage", "agents"):
                    if record.get(key):
                        record[key] = record[key][:num_calls]
                chosen[test] = record
        path.write_text("".join(json.dumps(record) + "\n" for record in chosen.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
