"""`python -m pic_bench.gpu`, what `make gpu` runs; packages that a bare machine lacks are replaced before anything."""

from __future__ import annotations

import sys

from pic_bench.gpu import stand_ins

if __name__ == "__main__":
    stand_ins.install()
    from pic_bench.gpu.day import main

    sys.exit(main())
