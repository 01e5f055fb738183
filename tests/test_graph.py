"""A decoding step as a CUDA graph: the same logits as step by step, and refusals where it cannot be one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import oscar_kv
from models import make_model
from oscar_kv import DecodeGraph, OscarCache, OscarConfig
from oscar_kv.integrations.transformers import CACHE_ARGUMENT
from oscar_kv.kernels import compile

LENGTHS = (250, 3, 121)
STEPS = 300  # crosses two flush boundaries in each row, and rows cross them at different steps


def llama(device: str) -> PreTrainedModel:
    return make_model().to(device, torch.float16)


def prompts(device: str) -> tuple[Tensor, Tensor]:
    """Left-padded ids and mask (3, 250)."""
    ids = torch.randint(3, 90, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS).unsqueeze(1)
    return ids.to(device), mask.long().to(device)


def run(model: PreTrainedModel, cache: OscarCache, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **{CACHE_ARGUMENT: cache}, **kwargs).logits[:, -1]


def start(model: PreTrainedModel, **kwargs: Any) -> tuple[OscarCache, Tensor, Tensor]:
    cache = OscarCache(model.config, max_length=1024, **kwargs)
    ids, mask = prompts(str(model.device))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return cache, run(model, cache, ids, attention_mask=mask, position_ids=positions), mask


def eager_steps(model: PreTrainedModel, cache: OscarCache, mask: Tensor, new: Tensor) -> list[Tensor]:
    """Logits after each of the new tokens (3, n)."""
    found = []
    for i in range(new.shape[1]):
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        positions = mask.sum(-1, keepdim=True) - 1
        found.append(run(model, cache, new[:, i : i + 1], attention_mask=mask, position_ids=positions))
    return found


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize(
    "config",
    [
        OscarConfig(),
        OscarConfig.quality(),
        OscarConfig(residual_length=256),
        OscarConfig(layers={1: {"key_bits": 3, "value_bits": 4}}),
    ],
)
def test_replay_while_lengths_grow_equals_eager(config: OscarConfig) -> None:
    model = llama("cuda")
    new = torch.randint(3, 90, (len(LENGTHS), STEPS), generator=torch.Generator().manual_seed(1)).cuda()
    with oscar_kv.enable(model, config):
        cache, _, mask = start(model, oscar_config=config)
        eager = eager_steps(model, cache, mask, new)
        other, _, _ = start(model, oscar_config=config)
        step = DecodeGraph(model, other)
        for i in range(STEPS):
            torch.testing.assert_close(step(new[:, i : i + 1]), eager[i], rtol=0.0, atol=0.0)
    for a, b in zip(cache.packed_layers, other.packed_layers, strict=True):
        assert a.state is not None
        assert b.state is not None
        assert a.state.num_blocks == b.state.num_blocks
        assert min(b.state.num_blocks) >= 2 if config.residual_length == 128 else min(b.state.num_blocks) >= 1
        assert b.state.counters is not None
        assert b.state.counters.num_blocks.tolist() == b.state.num_blocks
        assert b.state.counters.lengths.tolist() == b.state.tail_lengths
        for row, blocks in enumerate(a.state.num_blocks):
            assert torch.equal(a.state.records[row, :blocks], b.state.records[row, :blocks])
    assert cache.get_seq_length() == other.get_seq_length()


@pytest.mark.gpu
@torch.inference_mode()
def test_other_passes_may_come_between_and_rows_may_be_rearranged() -> None:
    model = llama("cuda")
    new = torch.randint(3, 90, (len(LENGTHS), 200), generator=torch.Generator().manual_seed(1)).cuda()
    order = torch.tensor([2, 0, 1])
    with oscar_kv.enable(model):
        cache, _, mask = start(model)
        other, _, _ = start(model)
        step = DecodeGraph(model, other)
        for i in range(20):
            step(new[:, i : i + 1])
        eager_steps(model, cache, mask, new[:, :20])
        turn = torch.cat((mask, mask.new_ones(len(mask), 20 + 150)), dim=1)
        positions = (turn.cumsum(-1) - 1)[:, -150:]
        for each in (cache, other):
            run(model, each, new[:, 20:170], attention_mask=turn, position_ids=positions)
            each.reorder_cache(order)
        eager = eager_steps(model, cache, turn[order], new[:, 170:])
        for i in range(30):
            torch.testing.assert_close(step(new[:, 170 + i : 171 + i]), eager[i], rtol=0.0, atol=0.0)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("max_length", [400, 16384])  # which attention takes in different kernels
def test_nothing_is_compiled_while_the_graph_is_captured(max_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_kernels", {})
    model = llama("cuda")
    with oscar_kv.enable(model):
        cache = OscarCache(model.config, max_length=max_length)
        ids, _ = prompts("cuda")
        run(model, cache, ids)
        step = DecodeGraph(model, cache)
        step(ids[:, :1])
        known = set(compile._kernels)
        step(ids[:, :1])
    assert set(compile._kernels) == known != set()
    assert step._graph is not None


@pytest.mark.gpu
@torch.inference_mode()
def test_the_graph_stops_where_the_cache_is_full() -> None:
    model = llama("cuda")
    with oscar_kv.enable(model):
        cache = OscarCache(model.config, max_length=135)
        ids, _ = prompts("cuda")
        run(model, cache, ids[:, :130])
        step = DecodeGraph(model, cache)
        for _ in range(5):
            step(ids[:, :1])
        with pytest.raises(ValueError, match="max_length is 135"):
            step(ids[:, :1])
        with pytest.raises(ValueError, match="3 rows"):
            step(ids[:2, :1])


def test_what_cannot_be_a_graph_is_refused() -> None:
    model = llama("cpu").float()
    with oscar_kv.enable(model):
        empty = OscarCache(model.config, max_length=512)
        with pytest.raises(ValueError, match="empty"):
            DecodeGraph(model, empty)
        cache = OscarCache(model.config)
        run(model, cache, prompts("cpu")[0])
        with pytest.raises(ValueError, match="max_length"):
            DecodeGraph(model, cache)
        cache, _, _ = start(model)
        with pytest.raises(NotImplementedError, match="no kernels for cpu"):
            DecodeGraph(model, cache)
        cache.activate_past_recording()
        with pytest.raises(NotImplementedError, match="take tokens back"):
            DecodeGraph(model, cache)
    empty = OscarCache(model.config, max_length=512)
    with pytest.raises(NotImplementedError, match="attention 'oscar'"):
        DecodeGraph(model, empty)


def test_a_sliding_layer_is_refused() -> None:
    model = make_model("gemma3", attention="oscar")
    cache = OscarCache(model.config, max_length=512)
    with pytest.raises(NotImplementedError, match=r"not packed: .*Sliding"):
        DecodeGraph(model, cache)
