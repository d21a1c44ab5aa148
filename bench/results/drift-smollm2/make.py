"""Makes the sessions of this record from MiniSWE's: `python make.py TRACES/miniswe_deepseek.jsonl.gz OUT.jsonl`.

Four sessions of 24 steps. Messages behind the second are cut to 1,600 characters, and of results, which the last two
steps bring, all earlier ones that are longer than 200 characters are a stub.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pic_traces.source import load

STUB = "[Old tool output cleared to save space; run the command again to see it.]"


def main(trace: str, out: str) -> None:
    """Write the calls, a line each."""
    long = (call.messages for call in ([*session.calls()][-1] for session in load(trace)) if len(call.messages) >= 50)
    with Path(out).open("w", encoding="utf8") as file:
        for number, messages in zip(range(4), long, strict=False):
            cut = [
                message | ({"content": str(message["content"])[:1600]} if i > 1 and _is_result(message) else {})
                for i, message in enumerate(messages)
            ]
            for step in [i for i, message in enumerate(cut) if not _is_result(message) and i > 1][:24]:
                before = [*cut[:step]]
                for i in [i for i in range(2, step) if _is_result(before[i])][:-2]:
                    if len(str(before[i]["content"])) > 200:
                        before[i] = before[i] | {"content": STUB}
                file.write(json.dumps({"session_id": f"s{number}", "messages": before, "response": cut[step]}) + "\n")


def _is_result(message: dict[str, object]) -> bool:
    return message["role"] != "assistant"


if __name__ == "__main__":
    main(*sys.argv[1:])
