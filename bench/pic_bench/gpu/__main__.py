"""`python -m pic_bench.gpu`, what `make gpu` runs."""

from __future__ import annotations

import sys

from pic_bench.gpu.day import main

if __name__ == "__main__":
    sys.exit(main())
