"""SGLang's envelope of KV hints, as options of a request."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_pic.adapter.serve.hints import RETAINED, with_hints
from sglang_pic.adapter.serve.options import FIRM, RequestOptions
from sglang_pic.errors import ConfigError

NONE = RequestOptions()


def envelope(*actions: tuple[str, dict[str, Any]], version: str = "1") -> dict[str, Any]:
    made = [
        {"action_id": f"id-{at}", "action_type": kind, "action_version": version, "payload": payload}
        for at, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": made}


@pytest.mark.parametrize(
    ("action", "options"),
    [
        (("pin", {}), RequestOptions(pin="id-0", pin_priority=FIRM)),
        (("pin", {"name": "a", "ttl_s": 60}), RequestOptions(pin="a", pin_ttl_s=60)),
        (("retain", {"name": "a"}), RequestOptions(pin="a", pin_priority=RETAINED)),
        (("retain", {"name": "a", "priority": 3, "ttl_s": 9}), RequestOptions(pin="a", pin_priority=3, pin_ttl_s=9)),
        (("demote", {"name": "a"}), RequestOptions(unpin="a")),
        (("release", {"name": "a"}), RequestOptions(unpin="a")),
        (("prefetch", {"of": "others"}), NONE),
    ],
)
def test_each_action_is_an_option(action: tuple[str, dict[str, Any]], options: RequestOptions) -> None:
    assert with_hints(NONE, envelope(action)) == options
    assert with_hints(NONE, envelope(action, version="2")) == NONE, "another version may mean something else"


def test_sglangs_own_type_is_read() -> None:
    from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

    hints = decode_kv_hints_envelope(envelope(("release", {"name": "a"}), ("retain", {"name": "b", "ttl_s": 5})))
    assert with_hints(NONE, hints) == RequestOptions(unpin="a", pin="b", pin_ttl_s=5, pin_priority=RETAINED)
    assert with_hints(RequestOptions(pin="c"), None) == RequestOptions(pin="c")


@pytest.mark.parametrize(
    ("actions", "named"),
    [
        ([("pin", {"name": "a b"})], "kv_hints payload name='a b'"),
        ([("retain", {"ttl_s": 0})], "kv_hints payload ttl_s=0: must be an integer from 1 to 604800"),
        ([("retain", {"ttl_s": "soon"})], "kv_hints payload of 'retain': Expected `int | null`, got `str`"),
        ([("pin", {"tokens": 4})], "unknown field `tokens`"),
        ([("release", {})], "missing required field `name`"),
        ([("pin", {}), ("retain", {})], "'retain' is the second action of its kind"),
    ],
)
def test_bad_payloads_are_named(actions: list[tuple[str, dict[str, Any]]], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_hints(NONE, envelope(*actions))
    assert named in str(caught.value)


def test_hints_and_options_may_not_both_pin() -> None:
    with pytest.raises(ConfigError, match=r"custom_params.pic pins or unpins too"):
        with_hints(RequestOptions(pin="a"), envelope(("pin", {})))
