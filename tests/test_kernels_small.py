"""Every kernel once on a small shape: what `make sanitize` runs under compute-sanitizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_kv.attention import attend
from oscar_kv.codec import PackedBlocks, decode
from oscar_kv.config import OscarConfig
from oscar_kv.kernels import decode_launch as rule
from oscar_kv.kernels.decode import decode_attention
from oscar_kv.kernels.dequantize import dequantize_blocks
from oscar_kv.kernels.encode import encode_blocks, start_rows
from oscar_kv.kernels.tail import Counters, TailLayer, append, flush
from oscar_kv.pack import RecordLayout
from oscar_kv.view import KVView

pytestmark = pytest.mark.gpu
CONFIG = OscarConfig()
ROWS, HEADS, DIM, GROUP = 2, 2, 64, 4
BLOCKS, TAILS = [3, 1], [127, 30]  # the first row's tail is complete with the next token
LAYOUT = RecordLayout(CONFIG, DIM, DIM, torch.float16)


class Store:
    """A layer's tensors on the GPU, with a prompt in each row."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float16, device="cuda", generator=generator)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device="cuda")

        self.keys, self.values = normal(ROWS, HEADS, 512, DIM), normal(ROWS, HEADS, 512, DIM)
        self.query = normal(ROWS, HEADS * GROUP, 1, DIM)
        self.records = zeros(ROWS, 5, HEADS, LAYOUT.record_bytes, dtype=torch.uint8)
        self.norms = zeros(ROWS, 5, 1, 128, dtype=torch.bfloat16)
        self.equalizer = zeros(ROWS, HEADS, DIM, dtype=torch.float32)
        self.sinks = tuple(zeros(ROWS, HEADS, CONFIG.num_sinks, DIM, dtype=torch.float16) for _ in range(2))
        self.tail = tuple(zeros(ROWS, HEADS, 128, DIM, dtype=torch.float16) for _ in range(2))
        for row, (blocks, length) in enumerate(zip(BLOCKS, TAILS, strict=True)):
            for tail, tokens in zip(self.tail, (self.keys, self.values), strict=True):
                tail[row, :, :length] = tokens[row, :, 128 * blocks : 128 * blocks + length]
        self.counters = Counters.zeros(ROWS, torch.device("cuda"))
        self.counters.set(TAILS, BLOCKS)
        plan = torch.tensor([[0, 0], BLOCKS, [0, 0]], dtype=torch.int32, device="cuda")
        start_rows(self.keys, self.values, LAYOUT, plan, self.sinks, self.equalizer)
        encode_blocks(
            self.keys, self.values, LAYOUT, self.equalizer, CONFIG.num_sinks, plan, self.records, self.norms
        )  # fmt: skip

    def attend(self, fresh: int) -> Tensor:
        counts = self.counters
        return decode_attention(
            self.query, LAYOUT, self.records, self.norms, counts.num_blocks, self.tail, counts.lengths, scaling=0.125,
            fresh=fresh, equalizer=self.equalizer, sinks=self.sinks,
        )  # fmt: skip

    def reference(self, fresh: int) -> Tensor:
        counts = self.counters
        lengths, num_blocks = counts.lengths.cpu() + fresh, counts.num_blocks.cpu()
        blocks = PackedBlocks(self.records.cpu(), self.norms.cpu())
        sinks, tail = (tuple(x.cpu() for x in pair) for pair in (self.sinks, self.tail))
        view = KVView(LAYOUT, blocks, num_blocks, self.equalizer.cpu(), sinks, tail, lengths, int(num_blocks.max()))
        return attend(self.query.cpu().float(), view, scaling=0.125).transpose(1, 2)


def check(got: Tensor, expected: Tensor) -> None:
    assert ((got.cpu().float() - expected).norm() / expected.norm()).item() < 1e-3


@pytest.mark.parametrize("cluster", [1, 2, None])
def test_a_step(cluster: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(layout: RecordLayout, columns: int, *args: Any) -> Any:
        if cluster is None:
            return None
        return rule.Short(2, cluster, 1, rule.short_bytes(layout, columns, 2, cluster))

    monkeypatch.setattr(rule, "short", short)
    store = Store()
    for step in range(3):
        token = slice(400 + step, 401 + step)
        append(store.keys[:, :, token], store.values[:, :, token], store.tail, store.counters, LAYOUT)
        check(store.attend(1), store.reference(1))
        layer = TailLayer(store.tail, store.counters, store.records, store.norms, store.equalizer, store.sinks)
        flush([layer], LAYOUT)
        check(store.attend(0), store.reference(0))
    assert store.counters.num_blocks.tolist() == [4, 1]
    assert store.counters.lengths.tolist() == [2, 33]


def test_dequantized_blocks_are_near_the_tokens() -> None:
    store = Store()
    keys, values = dequantize_blocks(store.records, store.norms, LAYOUT)
    exact = decode(PackedBlocks(store.records.cpu(), store.norms.cpu()), LAYOUT, equalizer=store.equalizer.cpu())
    assert keys.shape == values.shape == (ROWS, HEADS, 5 * 128, DIM)
    for row, count in enumerate(BLOCKS):
        tokens = slice(CONFIG.num_sinks, 128 * count)
        error = exact[0][row, :, tokens].float() - store.keys[row, :, tokens].cpu().float()
        assert error.norm() / store.keys[row, :, tokens].float().norm().cpu() < 0.6  # 2 bits
