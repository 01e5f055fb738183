"""Packed layers that have the state of a linear attention as well, and layers that read another layer's keys."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import oscar_kv
from families import text_model
from models import EXACT, forward, passes, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.integrations.switch import replaced_attention

CLOSE = {"atol": 5e-4, "rtol": 1e-4}
HYBRIDS = ("falcon_h1", "zamba2")
SHARING = ("gemma3n", "gemma4")


def truth(model: PreTrainedModel, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    return passes(model, ids, DynamicCache(config=model.config), sizes, mask)


@pytest.mark.parametrize("name", [*HYBRIDS, *SHARING])
def test_forks_and_copies_go_their_own_way(name: str) -> None:
    model = text_model(name)
    stem, _ = tokens(140)
    with replaced_attention(model, "oscar"):
        cache = OscarCache(model.config, EXACT)
        forward(model, stem, cache)
        for seed, branch in ((2, cache.fork()), (3, copy.deepcopy(cache)), (4, cache)):
            more, _ = tokens(120, seed=seed)
            got = passes(model, more, branch, [119, 1])
            with replaced_attention(model, "eager"):
                want = truth(model, torch.cat((stem, more), dim=1), [140, 119, 1])[:, 140:]
            torch.testing.assert_close(got, want, **CLOSE)
            assert [layer.state.num_blocks for layer in branch.packed_layers if layer.state] == [[2]] * len(
                branch.packed_layers
            )


@pytest.mark.parametrize("name", [*HYBRIDS, *SHARING])
def test_rows_are_rearranged_and_forgotten(name: str) -> None:
    """Repeat, reorder and select rows, with their states; after a reset rows of another number."""
    model = text_model(name)
    ids, mask = tokens(140, 60)
    more, own = tokens(100, 100, 100, 100, seed=2)
    order = torch.tensor([3, 0])
    kept = DynamicCache(config=model.config)
    forward(model, ids, kept, mask)
    rows = torch.tensor([0, 0, 1, 1])
    kept.reorder_cache(rows)  # transformers repeats and selects no rows of a linear attention
    kept.reorder_cache(order)
    seen = torch.cat((mask[rows][order], own[order]), dim=1)
    want = forward(model, more[order], kept, seen)
    with replaced_attention(model, "oscar"):
        cache = OscarCache(model.config, EXACT)
        forward(model, ids, cache, mask)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(order)
        torch.testing.assert_close(forward(model, more[order], cache, seen), want, **CLOSE)
        cache.reset()
        assert cache.get_seq_length() == 0
        got = passes(model, more[:1, :100].repeat(1, 3), cache, [280, 20])
    torch.testing.assert_close(got, truth(model, more[:1, :100].repeat(1, 3), [280, 20]), **CLOSE)


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_are_counted_and_cannot_be_rolled_back(name: str) -> None:
    model = text_model(name)
    with replaced_attention(model, "oscar"):
        cache = OscarCache(model.config, OscarConfig())
        forward(model, tokens(300)[0], cache)
    states = [
        x for layer in cache.layers for part in ("conv_states", "recurrent_states") for x in vars(layer)[part].values()
    ]
    assert cache.memory_bytes()["other_layers"] == sum(x.nbytes for x in states if x is not None) > 0
    with pytest.raises(ValueError, match="rolled back"):
        cache.crop(-1)
    assert cache.get_seq_length() == 300


@pytest.mark.parametrize("name", [*HYBRIDS, *SHARING])
def test_a_stored_prompt_goes_on(name: str, tmp_path: Path) -> None:
    """With the states of a linear attention, and layers of unequal head dimensions."""
    model = text_model(name)
    with replaced_attention(model, "oscar"):
        cache = OscarCache(model.config, OscarConfig())
        forward(model, tokens(300)[0], cache)
        cache.save(tmp_path / "prompt.safetensors")
        loaded = OscarCache.load(tmp_path / "prompt.safetensors", model.config)
        assert loaded.memory_bytes() == cache.memory_bytes()
        rest, _ = tokens(280, seed=2)
        assert torch.equal(passes(model, rest, loaded, [130, 1, 49]), passes(model, rest, cache, [130, 1, 49]))


def test_offloaded_blocks_of_a_hybrid() -> None:
    model = text_model("falcon_h1")
    ids, _ = tokens(300)
    with replaced_attention(model, "oscar"):
        got, want = (
            passes(model, ids, OscarCache(model.config, OscarConfig(), offload=offload), [280, 1])
            for offload in (True, False)
        )
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", SHARING)
def test_layers_that_share_keys_read_what_was_packed_before_the_pass(name: str) -> None:
    """In packed attention and dequantized alike, at 2 bits; a pass reads its own tokens as they are."""
    model = text_model(name)
    config = OscarConfig(equalize_queries=0.0)
    ids, mask = tokens(300, 160)
    got = []
    for attention in ("oscar", "sdpa"):
        with replaced_attention(model, attention):
            cache = OscarCache(model.config, config, attention_mask=None if attention == "oscar" else mask)
            got.append(passes(model, ids, cache, [130, 1, 120, 1, 1, 40, 1], mask)[mask.bool()])
    exact = truth(model, ids, [130, 1, 120, 1, 1, 40, 1], mask)[mask.bool()]
    assert (got[0] - got[1]).abs().mean() < 0.05 * (got[0] - exact).abs().mean()


@pytest.mark.parametrize("name", SHARING)
def test_what_shared_keys_do_not_do(name: str) -> None:
    """Offload, since a later layer reads the blocks again; and several devices, where marks are lost on the way."""
    model = text_model(name)
    with pytest.raises(NotImplementedError, match="share keys"):
        OscarCache(model.config, offload=True)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    try:
        with pytest.raises(NotImplementedError, match=r"several devices.*'sdpa'"):
            oscar_kv.enable(model)
        with oscar_kv.enable(model, attention="sdpa"):
            pass
    finally:
        del model.hf_device_map
