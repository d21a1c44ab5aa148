"""Time of a splice, by model shape, length and slot order: the command; its work is in `gpu.bandwidth`."""

from __future__ import annotations

import sys

from pic_bench.gpu.bandwidth import main

if __name__ == "__main__":
    sys.exit(main())
