"""Gap prefill against full prefill, and time and energy by run length, with random weights of published dimensions.

It needs neither SGLang nor weights: a GPU and the packages below. For the planner's own packages there are stand-ins.
This module imports nothing that may be missing, so that it can name what is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

_NEEDED: Final = ("torch", "numpy", "pic_kernels", "pic_native", "pic_traces", "sglang_pic")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2 where packages are missing, with a line that names all of them."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"not importable here: {', '.join(missing)}. Install them, or put them on PYTHONPATH; from a checkout "
            "PYTHONPATH=.:kernels:traces:bench.",
            file=sys.stderr,
        )
        return 2
    from pic_bench.gpu import stand_ins

    if replaced := stand_ins.install():
        print(f"stand-ins for {', '.join(replaced)}, which are not installed: plans are slower", file=sys.stderr)
    from pic_bench.gpu.command import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
