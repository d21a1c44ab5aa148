"""The attention backend of the CPU platform against a dense float64 reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pic_kernels.index_pages import KEY_DIM, PAGE_BYTES, quantise, read_keys, split_pages
from pic_platform.attention_ops import CausalMask, Scoring, attend_chosen, attend_decode, attend_extend
from pic_platform.attention_plan import DecodeGroup, plan_decode, plan_extend, plan_verify
from pic_platform.sparse_index import _choose
from torch import Tensor

from sglang_pic.errors import UnsupportedError
from tests.backends import kernels
from tests.backends.cases import Shape

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


SHAPES = {
    "gqa": Shape(9, 3, 64, 64),
    "mha": Shape(4, 4, 32, 32),
    "wide_keys": Shape(4, 2, 48, 32),
    "mla": Shape(8, 1, 576, 512, rope_dim=64),
}


def plain(shape: Shape) -> Scoring:
    """Scores of an ordinary layer."""
    return Scoring(shape.dim**-0.5)


def scorings(shape: Shape) -> list[Scoring]:
    """Windows shorter than a block of queries, longer, of one key before and of none; caps, sinks, and both."""
    scaling, sinks = shape.dim**-0.5, torch.linspace(-2, 3, shape.heads)
    return [
        *(Scoring(scaling, window) for window in (0, 1, 40, 130, 500)),
        Scoring(scaling, None, cap=2.0),
        Scoring(scaling, 40, cap=2.0),
        Scoring(scaling, None, sinks=sinks),
        Scoring(scaling, 31, cap=2.0, sinks=sinks.bfloat16()),
    ]


class Pool:
    """A KV pool with a scattered page table; slots that no sequence owns hold NaN."""

    def __init__(self, shape: Shape, lengths: list[int], page_size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        pages = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(pages) + 3, generator=generator) + 1
        self.table = torch.zeros(len(lengths), max(lengths) + page_size, dtype=torch.int32)
        num_slots = (len(order) + 1) * page_size
        self.keys = torch.full((num_slots, shape.kv_heads, shape.dim), float("nan"), dtype=dtype)
        self.values = torch.full((num_slots, shape.kv_heads, shape.value_dim), float("nan"), dtype=dtype)
        taken = 0
        for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
            first = order[taken : taken + count, None] * page_size
            slots = (first + torch.arange(page_size)).flatten()[:length]
            taken += count
            self.table[row, :length] = slots.int()
            self.table[row, length:] = 7_777_777  # stale entries must never be read
            self.keys[slots] = torch.randn(length, *self.keys.shape[1:], generator=generator).to(dtype)
            self.values[slots] = torch.randn(length, *self.values.shape[1:], generator=generator).to(dtype)
        if shape.is_mla:
            self.values = self.keys[..., : shape.value_dim]
        self.is_mla = shape.is_mla

    def value_pool(self) -> Tensor | None:
        return None if self.is_mla else self.values

    def dense(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first tokens of a row."""
        slots = self.table[row, :length].long()
        return self.keys[slots], self.values[slots]


def reference(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """Textbook causal attention in float64: the last query sees all keys."""
    window = -1 if scoring.window is None else scoring.window
    dense = kernels.Scoring(window, scoring.cap or 0.0, scoring.sinks)
    return kernels.attend(query.double(), keys, values, scoring.scaling, causal=True, scoring=dense)


def run_extend(
    pool: Pool,
    shape: Shape,
    query: Tensor,
    spans: list[tuple[int, int, int]],
    mask: CausalMask | None = None,
    scoring: Scoring | None = None,
) -> Tensor:
    """`attend_extend` over `(row, prefix_len, extend_len)` spans."""
    rows, prefixes, extends = (torch.tensor(column) for column in zip(*spans, strict=True))
    out = torch.full((query.shape[0], shape.heads, shape.value_dim), float("nan"), dtype=query.dtype)
    plan = plan_extend(pool.table, rows, prefixes, extends)
    scoring = scoring or plain(shape)
    mask = mask or CausalMask(shape.heads // shape.kv_heads, query.dtype, scoring.window)
    attend_extend(query, pool.keys, pool.value_pool(), plan, mask, scoring, out)
    return out


def make_query(num_tokens: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, shape.heads, shape.dim, generator=generator).to(dtype)


def check_extend(pool: Pool, shape: Shape, spans: list[tuple[int, int, int]], scoring: Scoring) -> None:
    """Each sequence is that of the reference."""
    query, start = make_query(sum(extend for *_, extend in spans), shape, pool.keys.dtype), 0
    out = run_extend(pool, shape, query, spans, scoring=scoring)
    for row, prefix, extend in spans:
        here = slice(start, start + extend)
        assert_close(out[here], reference(query[here], *pool.dense(row, prefix + extend), scoring))
        start += extend


def check_decode(pool: Pool, shape: Shape, lengths: list[int], scoring: Scoring) -> list[DecodeGroup]:
    """Each row is that of the reference; the groups in which they were computed."""
    query = make_query(len(lengths), shape, pool.keys.dtype)
    groups = plan_decode(pool.table, torch.arange(len(lengths)), torch.tensor(lengths), scoring.window)
    out = torch.full((len(lengths), shape.heads, shape.value_dim), float("nan"), dtype=query.dtype)
    attend_decode(query, pool.keys, pool.value_pool(), groups, scoring, out)
    for row, length in enumerate(lengths):
        assert_close(out[[row]], reference(query[[row]], *pool.dense(row, length), scoring))
    return groups


def check_paths(out: Tensor, query: Tensor, pool: Pool, paths: list[tuple[int, int, Tensor]], scoring: Scoring) -> None:
    """Each query is the last token of its path: a row, how much of it comes before, and places behind that."""
    for index, (row, prefix, path) in enumerate(paths):
        seen = torch.cat((torch.arange(prefix), prefix + path))
        keys, values = pool.dense(row, int(seen.max()) + 1)
        expected = reference(query[[index]], keys[seen], values[seen], scoring)
        assert_close(out[[index]], expected)


def assert_close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_extends_and_decodes_match_the_reference(name: str, page_size: int, dtype: torch.dtype) -> None:
    """Extends of one token and of several blocks, behind prefixes shorter and longer than the window.

    Gaps of one request share its row, and a decode batch mixes equal, similar and very different lengths.
    """
    shape, gaps = SHAPES[name], [(2, 5, 16), (2, 30, 1), (2, 33, 140)]
    spans = [(0, 0, 300), (1, 170, 1), *gaps, (3, 0, 1), (4, 600, 20)]
    lengths = [300, 171, 173, 1, 620]
    pool = Pool(shape, lengths, page_size, dtype)
    for scoring in (plain(shape),) if page_size == 1 else scorings(shape):
        check_extend(pool, shape, spans, scoring)
        groups = check_decode(pool, shape, lengths, scoring)
        assert sorted(index for group in groups for index in group.members.tolist()) == list(range(len(lengths)))


def test_queries_attend_to_what_an_indexer_chooses() -> None:
    """To the tokens with the highest scores, as they are written out here, up to each query's own."""
    shape, spans, num_chosen = SHAPES["mla"], [(0, 0, 150), (1, 30, 20), (1, 70, 1)], 20
    pool = Pool(shape, [150, 71], 64, torch.float32)
    pages = torch.zeros(len(pool.keys) // 64, 1, PAGE_BYTES).to(torch.float8_e4m3fn)
    numbers, factors = quantise(torch.randn(len(pages), 64, KEY_DIM))
    for part, written in zip(split_pages(pages), (numbers.view(torch.uint8), factors), strict=True):
        part.copy_(written)
    plan = plan_extend(pool.table, *(torch.tensor(column) for column in zip(*spans, strict=True)))
    queries, shares = torch.randn(171, 4, KEY_DIM).double(), torch.randn(171, 4).double()
    chosen = torch.full((171, num_chosen), -1, dtype=torch.int32)
    _choose(queries, shares, pages, plan, chosen)
    paths, places = [], [(row, prefix + at) for row, prefix, extend in spans for at in range(extend)]
    for index, (row, place) in enumerate(places):
        keys = read_keys(pages, pool.table[row, : place + 1].long()).double()
        scores = (shares[index][:, None] * (queries[index] @ keys.T).clamp(min=0)).sum(0)
        best = scores.argsort(descending=True, stable=True)[:num_chosen]
        assert set(chosen[index].tolist()) - {-1} == set(best.tolist())
        paths.append((row, 0, best))
    query, mask = make_query(171, shape, torch.float32), CausalMask(shape.heads, torch.float32)
    out = torch.full((171, shape.heads, shape.value_dim), float("nan"))
    attend_chosen(query, pool.keys, chosen, plan, mask, plain(shape), out)
    check_paths(out, query, pool, paths, plain(shape))


@pytest.mark.parametrize("window", [None, 2, 10, 60])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_nodes_of_trees_see_the_prefix_and_their_ancestors(name: str, dtype: torch.dtype, window: int | None) -> None:
    """A batch of trees behind prefixes of different lengths; a window is of a node's own path.

    A fourth sequence pads the batch, as where ranks gather tokens: it has no tree, and its rows are numbers.
    """
    shape, prefixes, num_nodes = SHAPES[name], [50, 1, 200, 1], 6
    parents = [[0, 0, 0, 1, 1, 2], [0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0]]
    scoring = Scoring(shape.dim**-0.5, window)
    pool = Pool(shape, [prefix + num_nodes for prefix in prefixes], 16, dtype)
    query = make_query(4 * num_nodes, shape, dtype)
    masks, paths = [], []
    for row, (prefix, above) in enumerate(zip(prefixes[:3], parents, strict=True)):
        visible = torch.eye(num_nodes, dtype=torch.bool)
        for node in range(1, num_nodes):
            visible[node] |= visible[above[node]]
        paths += [(row, prefix, seen.nonzero()[:, 0]) for seen in visible]
        masks.append(torch.cat((torch.ones(num_nodes, prefix, dtype=torch.bool), visible), dim=1).flatten())
    plan = plan_verify(pool.table, torch.arange(4), torch.tensor(prefixes), num_nodes, torch.cat(masks))
    out = torch.full((len(query), shape.heads, shape.value_dim), float("nan"), dtype=dtype)
    mask = CausalMask(shape.heads // shape.kv_heads, dtype, window)
    attend_extend(query, pool.keys, pool.value_pool(), plan, mask, scoring, out)
    assert out.isfinite().all()
    check_paths(out, query, pool, paths, scoring)


def test_unsupported_layers_are_refused() -> None:
    """One line that names the layer and the property."""
    from pic_platform.attention_backend import check_layer, check_pool
    from sglang.srt.layers.radix_attention import AttentionType

    usual = {"logit_cap": 30.0, "logit_capping_method": "tanh", "sliding_window_size": 4096, "use_irope": False}
    usual |= {"is_cross_attention": False, "attn_type": AttentionType.DECODER, "xai_temperature_len": -1}
    usual["k_scale"] = None
    check_layer("model.layers.0", SimpleNamespace(**usual))  # type: ignore[arg-type]
    for name, value, said in (
        ("logit_capping_method", "sigmoid", "capping by 'sigmoid'"),
        ("attn_type", AttentionType.ENCODER_ONLY, "attn_type"),
    ):
        with pytest.raises(UnsupportedError, match=rf"model\.layers\.7.*{said}"):
            check_layer("model.layers.7", SimpleNamespace(**usual | {name: value}))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="SimpleNamespace"):
        check_pool(SimpleNamespace())
