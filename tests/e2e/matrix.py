"""A plugin of pytest that records what tests marked `feature` came to: `pytest -m feature -p tests.e2e.matrix`."""

from __future__ import annotations

from typing import Final

import pytest
from pic_bench.pages import outcomes
from pic_bench.pages.outcomes import Outcome, Outcomes

_RANK: Final = ("passed", "skipped", "failed")


class Recorder:
    """Collects the outcomes in the process that reports them, whichever ran the test."""

    def __init__(self) -> None:
        self._tests: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test with parameters is as good as the worst of them."""
        features = dict(report.user_properties).get("features")
        if not isinstance(features, list) or (report.when != "call" and report.passed):
            return
        name = function_of(report.nodeid)
        before = self._tests.get(name, Outcome(features=[], outcome="passed"))
        worst = max(before.outcome, report.outcome, key=_RANK.index)
        self._tests[name] = Outcome(features=sorted({*before.features, *features}), outcome=worst)

    def pytest_sessionfinish(self) -> None:
        """Write what ran, beside what is on record of other tests with this version of SGLang."""
        from sglang_pic.adapter.sglang.contract import installed_version

        version = installed_version()
        before = outcomes.read() if outcomes.FILE.exists() else None
        kept = before.tests if before is not None and before.sglang == version else {}
        outcomes.write(Outcomes(sglang=version, tests=dict(sorted((kept | self._tests).items()))))


def pytest_configure(config: pytest.Config) -> None:
    """Record in the one process that sees every report."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have reports tell the features."""
    for item in items:
        if features := features_of(item):
            item.user_properties.append(("features", features))


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def features_of(item: pytest.Item) -> list[str]:
    return sorted({name for marker in item.iter_markers("feature") for name in marker.args})
