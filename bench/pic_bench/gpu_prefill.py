"""Gap prefill against full prefill, and time and energy by run length, with random weights of published dimensions.

Owns `python -m pic_bench.gpu_prefill` (`make bench-prefill`), which needs neither SGLang nor weights: a GPU, torch and
what a checkout carries. This module must import nothing that may be missing, so that it can say what is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

__all__ = ["main"]

# What the rest imports, and who asks for it.
_NEEDED: Final = {
    "torch": "everything",
    "numpy": "everything",
    "msgspec": "the core and the result",
    "xxhash": "the core",
    "fastcdc": "the core",
    "psutil": "the environment",
    "pic_kernels": "the splice (PYTHONPATH: kernels)",
    "pic_traces": "the environment (PYTHONPATH: traces)",
    "sglang_pic": "the core (PYTHONPATH: the repository)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2 where a package is missing, with a line that names all of them."""
    missing = [f"{name}, for {purpose}" for name, purpose in _NEEDED.items() if find_spec(name) is None]
    if missing:
        print("not importable here: " + "; ".join(missing) + ".", file=sys.stderr)
        print("Install them, or carry their wheels and put them on PYTHONPATH.", file=sys.stderr)
        return 2
    from pic_bench.gpu_command import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
