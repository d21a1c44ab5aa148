"""What the experiments' plugin does to a splice: keys left unrotated, rows corrupted, of those that ask for it."""

from __future__ import annotations

from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pic_bench.probe_plugin.options import ProbedOptions, RequestProbe
from pic_bench.probe_plugin.plugin import _Faults
from pic_bench.probe_plugin.recorder import Recorder

from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.adapter.serve.state import RequestState
from tests.adapter.builders import request, splice


def probed(probe: RequestProbe | None = None, **fields: Any) -> Any:
    """A request, of an experiment if `probe` is given."""
    options = RequestOptions() if probe is None else ProbedOptions(probe=probe)
    return request(range(4), pic=RequestState(options), **fields)


def test_faults_are_of_the_requests_that_ask_for_them() -> None:
    reqs = [probed(RequestProbe(rotate=False)), probed(), probed(RequestProbe(flip_donors=True)), probed()]
    plans = [splice(4, 20, (6, 12, -3)), None, splice(0, 9, (1, 3, 5)), splice(0, 9, (2, 4, 6))]
    rows = [torch.arange(100 * n, 100 * n + 64) for n in range(1, 5)]
    gap = build_gap_batch(plans, [4, 0, 0, 0], [16, 5, 9, 9], [16, 5, 9, 9], rows, torch.device("cpu"))
    keys = torch.ones(1000, 1)
    path = SimpleNamespace(splicer=SimpleNamespace(view=SimpleNamespace(places=lambda slots: [(keys, slots)])))
    faults = _Faults()
    faults.lay_out(gap, path, plans, SimpleNamespace(reqs=reqs), None)
    assert gap.splice.shifts.tolist() == [0] * 6 + [5] * 2 + [6] * 2
    faults.move_rows(None, path, gap)
    assert (keys < 0).nonzero()[:, 0].tolist() == [301, 302]
    faults.move_rows(None, path, gap)
    assert int((keys < 0).sum()) == 2, "a later splice is not corrupted"


def test_a_recording_is_whole(tmp_path: FilePath, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "records")
    req = probed(RequestProbe(record="one"))
    req.pic.spliced = [(1, 2)]
    told = recorder.watch(SimpleNamespace(reqs=[req]))
    assert told is not None
    for start in (0, 3):
        recorder.keep(torch.arange(start, start + 3))
    told("the runner's output")
    recorder.keep(torch.zeros(3))
    with np.load(tmp_path / "records" / "one.npz") as arrays:
        assert arrays["logits"].tolist() == [0, 1, 2, 3, 4, 5]
        assert arrays["spliced"].tolist() == [[1, 2]]
    req.extend_end = 3
    assert recorder.watch(SimpleNamespace(reqs=[req])) is None, "a chunk that ends earlier"
    assert recorder.watch(SimpleNamespace(reqs=[probed(rid="other"), req])) is None
    assert "shares its batch" in caplog.text
