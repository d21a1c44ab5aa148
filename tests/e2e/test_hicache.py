"""HiCache on servers: text whose rows left the device for the host is spliced from there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pic_bench.compare.server import free_port

from tests.e2e.servers import on_each_server
from tests.e2e.serving import Answer, Client, assert_same, leave_for_the_host, random_tokens, serve, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.feature("HiCache")]
TEXT = random_tokens(1, 500)
MOVED = [*random_tokens(2, 150), *TEXT, *random_tokens(3, 100)]


def served(client: Client, *, on_host: bool) -> Answer:
    """The moved text behind its donor, whose rows are still there or have left the device."""
    client.flush()
    client.generate(TEXT)
    if on_host:
        leave_for_the_host(client)
    return client.generate(MOVED)


@pytest.mark.feature("HiCache with DP attention", "HiCache with block-sparse attention")
@pytest.mark.feature("HiCache with sliding windows in a pool of their own")
@on_each_server(
    *("gqa_page1.small_pool", "mla_page16_tp2", "dsa_page64.host", "mtp_page1_dp2.host"),
    *("minimax_page16.host", "minimax_page64.host", "gpt_oss_page16.host", "gpt_oss_page64.host"),
)
def test_moved_text_is_spliced_from_the_host_as_from_the_device(client: Client) -> None:
    """To the last bit: the rows are the same, and so is their rotation."""
    device, host = (served(client, on_host=on_host) for on_host in (False, True))
    assert device.fetched_tokens == 0 < host.fetched_tokens == host.chunk_hit_tokens
    assert host.chunk_hit_tokens == device.chunk_hit_tokens > 400
    assert_same(device, host)


@pytest.mark.feature("HiCache with sliding windows in a pool of their own")
@on_each_server("gpt_oss_page16.host", "gpt_oss_page64.host")
def test_window_rows_are_spliced_from_the_host_beside_rows_of_the_device(client: Client) -> None:
    """Windows have 2,048 slots and the other layers 4,096: of the text only window rows have to leave."""
    device = served(client, on_host=False)
    client.flush()
    client.generate(TEXT)
    for number in range(4):
        client.generate(random_tokens(100 + number, 600), max_new_tokens=1)
    split = client.generate(MOVED)
    assert split.fetched_tokens > 400
    assert split.chunk_hit_tokens == device.chunk_hit_tokens
    assert_same(device, split)


@pytest.mark.feature("HiCache with block-sparse attention", "HiCache with sliding windows in a pool of their own")
@on_each_server("minimax_page16.host", "minimax_page64.host", "gpt_oss_page16.host", "gpt_oss_page64.host")
def test_shift_zero_from_the_host_equals_full_prefill(client: Client) -> None:
    """In float32; answers are decoded from what was spliced."""
    client.flush()
    full = client.generate(TEXT)
    assert full.cached_tokens == 0
    leave_for_the_host(client)
    spliced = client.generate(TEXT)
    assert spliced.fetched_tokens == spliced.chunk_hit_tokens > 400
    assert_same(full, spliced)


class Store(NamedTuple):
    """What servers share."""

    kind: str
    where: dict[str, Any]


@contextmanager
def mooncake(folder: Path) -> Iterator[Store]:
    """A store of Mooncake's on this machine."""
    pytest.importorskip("mooncake.store", reason="pip install sglang-pic[mooncake], and Debian's libibverbs1")
    port = free_port()
    master = [str(Path(sys.executable).with_name("mooncake_master")), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    where = {"master_server_address": f"127.0.0.1:{port}", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
    where |= {"device_name": "", "local_hostname": "127.0.0.1", "global_segment_size": 64 << 20}
    with (
        (folder / "master.log").open("wb") as log,
        subprocess.Popen([*master, f"--metrics_port={free_port()}"], stdout=log, stderr=log) as process,
    ):
        try:
            yield Store("mooncake", where)
        finally:
            process.kill()


@contextmanager
def files(folder: Path) -> Iterator[Store]:
    yield Store("file", {"file_storage_path": str(folder / "store")})


_CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
_NEXTN = ("--speculative-algorithm", "NEXTN", *_CHAIN)
# In the place of DRAFT stands the folder of a draft model.
_EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "DRAFT", *_CHAIN)
_WITH_DRAFT = pytest.mark.feature("a store of HiCache with speculative decoding")
_WITH_INDEX = pytest.mark.feature("a store of HiCache with a sparse-attention indexer")
SETUPS = [
    pytest.param("tiny-gqa", (), files, id="gqa-file"),
    pytest.param("tiny-mla", ("--tp-size", "2"), files, id="mla-tp2-file"),
    pytest.param("tiny-gqa", (), mooncake, id="gqa-mooncake"),
    pytest.param("tiny-gqa", _EAGLE, files, id="gqa-eagle-file", marks=_WITH_DRAFT),
    pytest.param("tiny-gqa", _EAGLE, mooncake, id="gqa-eagle-mooncake", marks=_WITH_DRAFT),
    pytest.param(
        *("tiny-mtp", ("--tp-size", "2", "--attn-dp-size", "2", *_NEXTN), files),
        id="mtp-dp2-file",
        marks=[_WITH_DRAFT, pytest.mark.feature("a store of HiCache with DP attention")],
    ),
    pytest.param("tiny-dsa", (), files, id="dsa-file", marks=_WITH_INDEX),
    pytest.param("tiny-dsa-mtp", _NEXTN, files, id="dsa-mtp-file", marks=[_WITH_DRAFT, _WITH_INDEX]),
    pytest.param("tiny-dsa-mtp", _NEXTN, mooncake, id="dsa-mtp-mooncake", marks=[_WITH_DRAFT, _WITH_INDEX]),
    pytest.param(
        *("tiny-minimax", (), files),
        id="minimax-file",
        marks=pytest.mark.feature("a store of HiCache with block-sparse attention"),
    ),
]


@pytest.mark.slow
@pytest.mark.feature("a store of HiCache")
@pytest.mark.parametrize(("model", "flags", "shared"), SETUPS)
def test_text_that_one_server_computed_is_spliced_by_another(
    model: str, flags: tuple[str, ...], shared: Callable[[Path], Any], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """It loads them as a prefix, and splices them at another place, to the last bit as rows of its own.

    Every token after them depends on its index keys, and how many guesses are right on a draft's rows.
    """
    # In whole pages of each size, and the token after them, which the keys of trees for EAGLE name.
    text = random_tokens(21, 513)
    moved = [*random_tokens(2, 150), *text, *random_tokens(3, 300)]
    flags = tuple(str(model_dir("tiny-gqa-eagle")) if flag == "DRAFT" else flag for flag in flags)
    # The first server loads nothing: it would find what the second has spliced.
    with shared(tmp_path) as store, serve_on(store, model_dir(model), tmp_path, *flags, least_load=10_000) as first:
        first.generate(text)
        wait_until(lambda: num_backed_up(first) >= 512)
        with serve_on(store, model_dir(model), tmp_path, *flags) as second:
            # The last token of a prompt is computed, and trees for EAGLE name a row by the next token, too.
            assert second.generate([*text, 5]).cached_tokens == 512
            loaded = second.generate(moved, max_new_tokens=24)
        own = first.generate(moved, max_new_tokens=24)
        assert loaded.chunk_hit_tokens == own.chunk_hit_tokens > 450
        assert_same(loaded, own)
        assert loaded.right_guesses == own.right_guesses
        assert own.right_guesses > 0 or "--speculative-algorithm" not in flags


@pytest.mark.slow
@pytest.mark.feature("a store of HiCache")
@pytest.mark.parametrize(
    ("model", "flags", "page_size", "num_pools"),
    [
        pytest.param("tiny-gqa", (), 16, 1, id="gqa"),
        pytest.param("tiny-gqa", _EAGLE, 16, 2, id="gqa-eagle", marks=_WITH_DRAFT),
        pytest.param("tiny-dsa-mtp", _NEXTN, 64, 2, id="dsa-mtp", marks=[_WITH_DRAFT, _WITH_INDEX]),
    ],
)
def test_a_store_holds_what_any_server_would_compute(
    *,
    model: str,
    flags: tuple[str, ...],
    page_size: int,
    num_pools: int,
    model_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """What one server spliced reaches nobody else, a server without the plugin included."""
    flags = tuple(str(model_dir("tiny-gqa-eagle")) if flag == "DRAFT" else flag for flag in flags)

    def stored() -> int:
        return len(list((tmp_path / "store").glob("*.bin"))) // num_pools

    with files(tmp_path) as store:
        with serve_on(store, model_dir(model), tmp_path, *flags) as first:
            first.generate(TEXT)
            wait_until(lambda: stored() >= len(TEXT) // page_size)
            assert first.generate(MOVED).chunk_hit_tokens > 400
            apart = first.generate(MOVED, pic={"mode": "off"}, max_new_tokens=24)
            wait_until(lambda: stored() >= (len(TEXT) + len(MOVED)) // page_size)
        with serve_on(store, model_dir(model), tmp_path, *flags, backend=None) as stock:
            assert stock.generate(TEXT).cached_tokens > 490 - page_size, "it was computed, and the key is the text's"
            exact = stock.generate(MOVED, max_new_tokens=24)
            assert exact.cached_tokens == 0, "nothing behind a splice was written under the text's key"
            assert_same(exact, apart)
            assert exact.right_guesses == apart.right_guesses
        with serve_on(store, model_dir(model), tmp_path, *flags) as second:
            assert second.generate([*MOVED, *random_tokens(4, 40)]).cached_tokens > 700, "under keys of its own"


def num_backed_up(client: Client) -> float:
    """Tokens that a server has written to its store, as SGLang counts them."""
    lines = client.server.get("/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("sglang:backuped_tokens_total{"))


def serve_on(
    store: Store, model: Path, folder: Path, *flags: str, backend: str | None = "pic", least_load: int = 256
) -> Any:
    """A server on a store, which waits for all that is there, if it is so many tokens."""
    host = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-storage-prefetch-policy", "wait_complete")
    # A prefetch is not late on a busy machine.
    where = json.dumps(store.where | {"prefetch_threshold": least_load, "prefetch_timeout_base": 20})
    host += ("--hicache-storage-backend", store.kind, "--hicache-storage-backend-extra-config", where)
    plain = ("--dtype", "float32", "--page-size", "16", *host)
    return serve(model, folder, *plain, *flags, config={"cost_gate": "off"}, backend=backend)
