"""Known nonces in logs: `explain` names them with their switches, `fix` removes them, alone or as a gateway's rule."""

from __future__ import annotations

import asyncio
import html
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pic_traces import load

from sglang_pic.cli import main
from sglang_pic.nonces import NONCES, strip
from tests.helpers.explain_fakes import prose

HEADER = "x-anthropic-billing-header: cc_version=2.1.177.{0:02x}c; cc_entrypoint=sdk-cli; cch={0:05x};"
RUN = "Runtime: agent=main | session=agent:main:cron:daily{} | host=h | os=Linux"
FORMS = [
    ("claude-code-billing", f"{HEADER}\nYou are Claude Code.", "You are Claude Code."),
    ("claude-code-billing", f"{HEADER} cc_workload=cron;\nYou are", "You are"),
    ("claude-code-billing", HEADER, ""),
    (
        "hermes-minute",
        "I help.\n\nConversation started: Sunday, May 17, 2026 03:4{} PM\nModel: m",
        "I help.\n\nConversation started: Sunday, May 17, 2026\nModel: m",
    ),
    (
        "openclaw-run",
        f"You help.\n{RUN.format(':run:e3f4a5b6-0000-4000-8000-00000000000{}')}\n## Tools",
        f"You help.\n{RUN.format('')}\n## Tools",
    ),
]
"""By the name of a nonce, texts as its thread has them, with a number to fill in, and the texts without it."""
SOUND = [
    "The header x-anthropic-billing-header: is for bills.",
    "Conversation started: Sunday, May 17, 2026\nat 03:42 PM",
    RUN.format(""),
    "Runtime: agent=main | session=agent:main:main | host=h:run:1",
]


@pytest.mark.parametrize(("name", "text", "without"), FORMS)
def test_a_form_of_a_thread_is_removed_exactly(name: str, text: str, without: str) -> None:
    assert strip(text.format(1), NONCES) == (without, [name])


@pytest.mark.parametrize("text", SOUND)
def test_what_only_resembles_one_stays(text: str) -> None:
    assert strip(text, NONCES) == (text, [])


def log_of(path: Path, name: str) -> Path:
    """Three turns of a conversation whose nonce is another in each; Claude Code sends it as a block of its own."""
    text = next(text for known, text, _ in FORMS if known == name)
    messages: list[dict[str, Any]] = []
    lines = []
    for turn in range(3):
        messages = [*messages, {"role": "user", "content": f"Question {turn}. {prose(turn)}"}]
        system: Any = f"{text.format(turn)}\n{prose(9)}"
        if name == "claude-code-billing":
            system = [{"type": "text", "text": part} for part in (HEADER.format(turn), prose(9))]
        lines.append({"session_id": "s", "system": system, "messages": messages, "max_tokens": 9})
        messages = [*messages, {"role": "assistant", "content": f"Answer {turn}."}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", NONCES)
def test_explain_and_fix_name_it_and_its_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    log, page, fixed = (log_of(tmp_path / "log.jsonl", name), tmp_path / "page.html", tmp_path / "fixed.jsonl")
    nonce = NONCES[name]
    assert main(["explain", str(log), "--quiet", "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "A known nonce of an agent" in printed
    assert f"{nonce.title}: {nonce.switch}" in printed
    assert html.escape(f"{nonce.title}: {nonce.switch}", quote=False) in page.read_text().replace("&#39;", "'")

    assert main(["fix", str(log), "--quiet", "--out", str(fixed)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"3 of 3 calls: {nonce.title} is removed from {nonce.place}" in printed
    assert nonce.switch in printed
    assert not any(strip(str(call.messages[0]["content"]), NONCES)[1] for one in load(fixed) for call in one.calls())
    for gateway in ("litellm", "nginx"):
        assert main(["fix", str(log), "--gateway", gateway]) == 0
        assert json.dumps([nonce.kept, nonce.removed, nonce.within]) in capsys.readouterr().out
        assert main(["fix", str(fixed), "--gateway", gateway]) == 2
        assert f"none of the known nonces, {', '.join(NONCES)}" in capsys.readouterr().err


def test_the_rule_for_litellm_removes_what_the_server_removes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteLLM calls the hook of a `CustomLogger` with the parsed body of each request."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(log_of(tmp_path / name, name).read_text() for name in NONCES))
    assert main(["fix", str(log), "--gateway", "litellm"]) == 0
    base = ModuleType("litellm.integrations.custom_logger")
    base.CustomLogger = object  # type: ignore[attr-defined]
    for module in ("litellm", "litellm.integrations", base.__name__):
        monkeypatch.setitem(sys.modules, module, base)
    rule: dict[str, Any] = {}
    exec(capsys.readouterr().out, rule)

    def served(data: dict[str, Any]) -> Any:
        return asyncio.run(rule["callback"].async_pre_call_hook(None, None, data, "completion"))

    user = {"role": "user", "content": HEADER.format(1)}
    for text, without in [(text.format(1), without) for _, text, without in FORMS] + [(text, text) for text in SOUND]:
        assert served({"system": text, "messages": [user]}) == {"system": without, "messages": [user]}
        parts = [{"type": "text", "text": each} for each in (text, "More.")]
        left = [{"type": "text", "text": each} for each in (without, "More.") if each]
        assert served({"system": parts, "messages": [user]}) == {"system": left, "messages": [user]}
        chat = {"messages": [{"role": "system", "content": text}, user]}
        assert served(chat) == {"messages": [*([{"role": "system", "content": without}] if without else []), user]}
    assert served({"model": "m", "input": "a"}) == {"model": "m", "input": "a"}
