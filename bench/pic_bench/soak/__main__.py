"""`python -m pic_bench.soak`."""

from __future__ import annotations

import sys

from pic_bench.soak.command import main

if __name__ == "__main__":
    sys.exit(main())
