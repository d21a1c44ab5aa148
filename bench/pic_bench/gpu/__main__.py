"""`python -m pic_bench.gpu`, the command of `make gpu`."""

from __future__ import annotations

import sys

from pic_bench.gpu.day import main

if __name__ == "__main__":
    sys.exit(main())
