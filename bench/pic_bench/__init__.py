"""What measures this project: comparisons, fidelity, benchmarks, and studies that were run once.

The code of a study that was run once lies beside the results, in bench/results/studies of a checkout; from there it is
a module of this package like the others: `python -m pic_bench.planted`.
"""

from __future__ import annotations

from pathlib import Path

_STUDIES = Path(__file__).resolve().parents[1] / "results" / "studies"
if _STUDIES.is_dir():
    __path__.append(str(_STUDIES))
