"""A process with SGLang's backends over reference kernels: one comparison for each line of its input.

`{"backend": "fa3", "shape": "gqa", "page_size": 16, "case": "one_run", "mutation": null, "dtype": "float32"}` is
answered with `{"error": ..., "decode_error": ..., "sequences": ...}`, or with `{"failure": ...}` where an exception
was raised.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from typing import Any


def main() -> None:
    """Answer line by line until the input ends."""
    os.environ["TRITON_INTERPRET"] = "1"
    # Imports print; the answers alone go to the parent.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        torch.set_num_threads(1)
        from tests.backends.comparison import compare

        for line in sys.stdin:
            answers.write(json.dumps(_answer(compare, json.loads(line))) + "\n")


def _answer(compare: Any, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(compare(**question)._asdict())
    except Exception:
        return {"failure": traceback.format_exc()}


if __name__ == "__main__":
    main()
