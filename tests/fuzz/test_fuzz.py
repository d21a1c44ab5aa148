"""Readers get any bytes, nearly right documents, and the inputs that minutes of fuzzing by coverage once found."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.documents import documents
from tests.fuzz.readers import TARGETS

DEEP = 5_000
FOUND: dict[str, list[bytes]] = {
    "trace": [
        b"[" * DEEP,
        b"\x00" + b'{"messages":' + b"[" * DEEP + b"]" * DEEP + b"}\n",
        b"\x01" + b'{"messages":[{"role":"user"}],"tools":' + b"[" * DEEP,
    ],
    "records": [b"[" * DEEP],
    "stream": [b"data: " + b"[" * DEEP + b"\n\n", b'{"error":' * DEEP],
    "options": [],
    "config": [b"\xff\xfe", b'{"core":' * DEEP],
}
"""Inputs that once ended in another error than the documented one, or in none in time."""


@pytest.mark.parametrize(("target", "data"), [(name, data) for name, all_of in FOUND.items() for data in all_of])
def test_what_was_found_is_mended(target: str, data: bytes) -> None:
    begun = time.process_time()
    TARGETS[target](data)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes_and_nearly_right_documents_end_in_documented_errors(target: str) -> None:
    @settings(max_examples=90, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(documents(target) | st.binary(max_size=200))
    @example(b'data: {"error":{"message":"a stream that ends inside its last event"}}')
    def run(data: bytes) -> None:
        TARGETS[target](data)

    run()
