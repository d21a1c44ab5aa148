"""Two ranks make the same plans from the same requests, over a long random run.

A longer one: SGLANG_PIC_RANK_STEPS=100000 pytest --timeout=0 tests/adapter/test_rank_plans.py -s
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

STEPS = int(os.environ.get("SGLANG_PIC_RANK_STEPS", "3000"))
# What a thousand steps meet at least.
MET = {
    **{"plans": 600, "plans with runs": 80, "runs": 120, "changed fields": 8, "cost_gate": 1, "donor_evicted": 20},
    **{"aborts": 40, "flushes": 1, "rows read": 15_000, "evicted from the index": 50_000},
}


def test_ranks_plan_alike(tmp_path: Path) -> None:
    """Hash seeds, clocks, addresses, garbage collection and slot numbers are each rank's own."""
    code = "import sys; from tests.adapter import rank_driver; rank_driver.run(int(sys.argv[1]), 2, {!r}, {}, seed=18)"
    command = [sys.executable, "-c", code.format(str(tmp_path / "store"), STEPS)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(100 + rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=280 + STEPS // 20) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said[-2000:] for _, said in ended)
    counts: dict[str, int] = json.loads(ended[0][0].splitlines()[-1])
    print(counts)
    for name, least in MET.items():
        assert counts.get(name, 0) >= least * STEPS // 1000, (name, counts)
