"""Settings of single layers: each layer is what a cache with that configuration for all layers would have there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import oscar_kv
from forced import blocks, logits
from models import COMMON, EXACT, make_model, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.footprint import packed_bits
from oscar_kv.pack import RecordLayout

MODES = ("oscar", "sdpa")
OWN = {"key_bits": 4, "value_bits": 3, "metadata": "float16", "value_group": 16, "num_sinks": 7}
MIXED = replace(OscarConfig.quality(), layers={1: OWN})


def test_fields_of_a_layer() -> None:
    assert MIXED.for_layer(0) == OscarConfig.quality()
    assert MIXED.for_layer(1) == replace(OscarConfig.quality(), **OWN)
    assert MIXED.for_layer(1).layers == {}


def test_equality_hash_and_json() -> None:
    same = replace(OscarConfig.quality(), layers={1: dict(OWN)})
    assert same == MIXED != OscarConfig.quality()
    assert hash(same) == hash(MIXED)
    assert OscarConfig(**json.loads(json.dumps(asdict(MIXED)))) == MIXED
    assert list(OscarConfig(layers={3: {}, 1: {}}).layers) == [1, 3]


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ({0: {"value_bits": 5}}, r"layers\[0\]: value_bits must be one of"),
        ({0: {"bits": 4}}, r"layers\[0\]: what may differ is not bits"),
        ({0: {"residual_length": 256}}, r"layers\[0\]: what may differ is not residual_length"),
        ({0: {"layers": {}}}, r"layers\[0\]: what may differ is not layers"),
        ({0: {"zero_point": "int"}}, r"layers\[0\]: zero_point='int' needs 16-bit metadata"),
    ],
)
def test_bad_settings(layers: dict[int, dict[str, Any]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        OscarConfig(layers=layers)


@pytest.mark.parametrize(("name", "index"), [("llama", 2), ("gemma3", 0)])  # no such layer; one with a window
def test_layers_that_are_not_packed(name: str, index: int) -> None:
    model = make_model(name)
    with pytest.raises(ValueError, match=rf"layers that are not packed: \[{index}\]"):
        OscarCache(model.config, OscarConfig(layers={index: {"key_bits": 4}}))


def test_values_are_rotated_in_all_layers_or_in_none_to_fold_them() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match="rotate_values for single layers"):
        oscar_kv.enable(model, OscarConfig(layers={0: {"rotate_values": False}}), fold_values=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_is_that_of_a_cache_of_its_own(mode: str) -> None:
    """The blocks of a padded batch's prompt, which is computed exactly and so the same with any cache."""
    model = make_model("llama", attention=mode)
    ids, mask = tokens(300, 151)
    caches = []
    for config in (MIXED, MIXED.for_layer(0), MIXED.for_layer(1)):
        cache = OscarCache(model.config, config, attention_mask=None if mode == "oscar" else mask)
        logits(model, {"input_ids": ids, "attention_mask": mask}, cache, tokens(1, 1)[0].expand(2, 1))
        caches.append([layer.state for layer in cache.packed_layers])
    for index, whole in ((0, caches[1]), (1, caches[2])):
        got, want = caches[0][index], whole[index]
        assert got is not None
        assert want is not None
        assert got.num_blocks == want.num_blocks == [2, 1]
        assert got.layout == want.layout
        for row, count in enumerate(got.num_blocks):
            for name in ("records", "norms"):
                assert torch.equal(getattr(got, name)[row, :count], getattr(want, name)[row, :count])
        assert torch.equal(got.sink_keys, want.sink_keys)


@pytest.mark.parametrize("mode", MODES)
def test_exact_in_one_layer_or_packed_in_the_other(mode: str) -> None:
    """The same cache said in two ways; and neither is the 16-bit cache."""
    model = make_model("llama", attention=mode)
    ids, mask = tokens(300, 151)
    inputs = {"input_ids": ids, "attention_mask": mask}
    chosen = tokens(40, 40, seed=2)[0]
    exact, two = ({"key_bits": bits, "value_bits": bits} for bits in (16, 2))
    found = []
    for config in (OscarConfig(layers={0: exact}), replace(EXACT, layers={1: two}), EXACT):
        cache = OscarCache(model.config, config, attention_mask=None if mode == "oscar" else mask)
        found.append(logits(model, inputs, cache, chosen))
        assert blocks(cache) == [[2, 1]] * 2
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).abs().max() > 1e-2


def test_bits_are_those_of_the_layers() -> None:
    model = make_model("llama")
    with oscar_kv.enable(model, MIXED), torch.inference_mode():
        cache = OscarCache(model.config, MIXED)
        model(tokens(300, 300)[0], past_key_values=cache)
    dim, heads = COMMON["head_dim"], COMMON["num_key_value_heads"]
    bits = []
    for index in range(2):
        layout = RecordLayout(MIXED.for_layer(index), dim, dim, torch.float32)
        bits.append((8 * layout.record_bytes / 128 + 16 / heads) / (2 * dim))
    assert packed_bits(cache) == pytest.approx(sum(bits) / 2)


def test_stored_and_forked(tmp_path: Path) -> None:
    model = make_model("llama")
    ids = tokens(300, 300)[0]
    with oscar_kv.enable(model, MIXED), torch.inference_mode():
        cache = OscarCache(model.config, MIXED)
        model(ids, past_key_values=cache)
        cache.save(tmp_path / "cache")
        loaded = OscarCache.load(tmp_path / "cache", model.config)
        assert loaded.oscar_config == MIXED
        with pytest.raises(ValueError, match="stored cache has config"):
            OscarCache.load(tmp_path / "cache", model.config, OscarConfig.quality())
        forked = cache.fork()
        new = tokens(200, 200, seed=3)[0]
        want = model(new, past_key_values=cache).logits
        for other in (loaded, forked):
            assert torch.equal(model(new, past_key_values=other).logits, want)
