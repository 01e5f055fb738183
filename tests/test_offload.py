"""Packed blocks in host memory: the same bits as in GPU memory, of which two layers' blocks are taken at most."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import oscar_kv
from models import CONFIGS, EXACT, forward, generate, make_model, oscar_cache, passes, tokens
from oscar_kv import DecodeGraph, OscarCache, OscarConfig
from oscar_kv.layer import LayerState

pytestmark = pytest.mark.usefixtures("same_launches")

MODES = ("oscar", "sdpa")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [9, 1, 1, 60]
DEFAULT = OscarConfig()


def model_on(device: str, name: str = "llama", mode: str = "oscar", **overrides: int) -> PreTrainedModel:
    dtype = torch.float16 if device == "cuda" else torch.float32
    return make_model(name, attention=mode, **overrides).to(device, dtype)


def states(cache: OscarCache) -> list[LayerState]:
    return [layer.state for layer in cache.packed_layers if layer.state is not None]


def both(model: PreTrainedModel, config: OscarConfig, mask: Tensor) -> tuple[OscarCache, OscarCache]:
    """A cache in host memory, and one beside the model."""
    return oscar_cache(model, config, mask, offload=True), oscar_cache(model, config, mask)


def check_same(a: OscarCache, b: OscarCache) -> None:
    """The same packed bytes, wherever they are."""
    for mine, other in zip(states(a), states(b), strict=True):
        assert mine.num_blocks == other.num_blocks
        for row, count in enumerate(mine.num_blocks):
            ours, theirs = ([x.records[row].cpu() for x in state.packed(0, count)] for state in (mine, other))
            assert torch.equal(torch.cat(ours), torch.cat(theirs))
            if mine.norms is not None:
                ours, theirs = ([x.norms[row].cpu() for x in state.packed(0, count)] for state in (mine, other))  # type: ignore[index]
                assert torch.equal(torch.cat(ours), torch.cat(theirs))
        for name in ("sink_keys", "equalizer", "tail_keys"):
            if name != "tail_keys" and mine.tensors().get(name) is not None:
                assert torch.equal(mine.tensors()[name], other.tensors()[name])


def check_logits(a: Tensor, b: Tensor, *, bits: bool) -> None:
    """The same bits; or not, where a GPU reads the shared pieces of a resident cache one by one, in chunks."""
    assert torch.equal(a, b) if bits else (a.argmax(-1) == b.argmax(-1)).float().mean() > 0.98


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [EXACT, *CONFIGS.values()], ids=["exact", *CONFIGS])
def test_offloaded_is_resident_bit_for_bit(config: OscarConfig, mode: str, device: str) -> None:
    """Padded rows, passes of any size, past two boundaries in every row."""
    model = model_on(device, mode=mode)
    ids, mask = tokens(300, 5, 140)
    rest, own = tokens(290, 290, 290, seed=5)
    seen = torch.cat((mask, own), dim=1).to(device)
    mask = mask.to(device)
    caches = both(model, config, mask)
    got = []
    for cache in caches:
        forward(model, ids.to(device), cache, mask)
        got.append(passes(model, rest.to(device), cache, SIZES, seen))
    assert torch.equal(*got)
    check_same(*caches)
    assert states(caches[0])[0].num_blocks == [4, 2, 3]
    assert all(state.records.device.type == "cpu" for state in states(caches[0]))
    assert caches[0].memory_bytes()["codes"] == caches[1].memory_bytes()["codes"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_generation(name: str, device: str) -> None:
    """The same tokens, greedy and in beams (whose rows are rearranged at every step)."""
    model = model_on(device, name)
    ids = tokens(200)[0].to(device)
    for options in ({}, {"num_beams": 3}):
        want = generate(model, ids, oscar_cache(model, DEFAULT), 190, **options)
        assert torch.equal(generate(model, ids, oscar_cache(model, DEFAULT, offload=True), 190, **options), want)


@pytest.mark.parametrize("device", DEVICES)
def test_everything_that_changes_blocks(device: str) -> None:
    """What was copied ahead is not read after its blocks have changed."""
    model = model_on(device, num_hidden_layers=3)
    ids, rest = tokens(390, 390)[0].to(device), tokens(150, 150, seed=2)[0].to(device)
    caches = both(model, DEFAULT, torch.ones(2, 390))
    logits: list[list[Tensor]] = []
    for cache in caches:
        got = [forward(model, ids, cache), passes(model, rest, cache, SIZES)]
        cache.crop(-(540 - 256))
        got.append(passes(model, rest, cache, SIZES))
        cache.reorder_cache(torch.tensor([1, 0], device=device))
        got.append(passes(model, rest.flip(0), cache, SIZES))
        cache.batch_select_indices(torch.tensor([1]))
        got.append(passes(model, rest[:1], cache, SIZES))
        cache.batch_repeat_interleave(3)
        got.append(passes(model, rest[:1].repeat(3, 1), cache, SIZES))
        branch = copy.deepcopy(cache)
        got.append(passes(model, rest[:1].repeat(3, 1), branch, SIZES))
        got.append(passes(model, rest[:1].flip(1).repeat(3, 1), cache, SIZES))
        cache.reset()
        got.append(passes(model, rest, cache, SIZES))
        logits.append(got)
    for i, (a, b) in enumerate(zip(*logits, strict=True)):
        check_logits(a, b, bits=device == "cpu" or i not in (5, 6, 7))  # where three rows share blocks


@pytest.mark.parametrize("device", DEVICES)
def test_forks_and_files(device: str, tmp_path: Path) -> None:
    model = model_on(device)
    ids, rest = tokens(300)[0].to(device), tokens(290, seed=2)[0].to(device)
    caches = both(model, DEFAULT, torch.ones(1, 300))
    got = []
    for cache in caches:
        forward(model, ids, cache)
        fork = cache.fork()
        passes(model, rest, fork, SIZES)
        fork.save(tmp_path / "fork.safetensors")
        offload = cache is caches[0]
        loaded = OscarCache.load(tmp_path / "fork.safetensors", model.config, device=model.device, offload=offload)
        got.append([passes(model, rest, x, [7]) for x in (loaded, cache.fork().fork(), cache)])
        assert (states(loaded)[0].records.device.type == "cpu") == (offload or device == "cpu")
    for a, b in zip(*got, strict=True):
        check_logits(a, b, bits=device == "cpu")


def test_max_length_is_kept() -> None:
    model = model_on("cpu")
    cache = oscar_cache(model, DEFAULT, offload=True, max_length=400)
    passes(model, tokens(400)[0], cache, [250, 50])
    places = [state.records.data_ptr() for state in states(cache)]
    with pytest.raises(ValueError, match="max_length 400"):
        forward(model, tokens(1)[0], cache)
    assert places == [state.records.data_ptr() for state in states(cache)]


def test_a_graph_of_it_is_refused() -> None:
    model = model_on("cpu", mode="sdpa")
    with oscar_kv.enable(model):
        cache = OscarCache(model.config, max_length=512, offload=True)
        forward(model, tokens(200)[0], cache)
        with pytest.raises(NotImplementedError, match="offload=True"):
            DecodeGraph(model, cache)


def test_an_unknown_device_is_refused() -> None:
    model = model_on("cpu").to("meta")
    with pytest.raises(NotImplementedError, match="offload from a meta device"):
        forward(model, tokens(10)[0].to("meta"), oscar_cache(model, DEFAULT, offload=True))


# --- on a GPU


@pytest.mark.gpu
def test_gpu_memory_holds_two_layers_at_most() -> None:
    """Of eight layers whose packed blocks are most of the memory: at any moment of decoding over 32K tokens."""
    model = model_on("cuda", num_hidden_layers=8, head_dim=64, max_position_embeddings=65536)
    ids = tokens(32768)[0].cuda()
    peaks, packed = {}, {}
    for offload in (False, True):
        cache = oscar_cache(model, DEFAULT, offload=offload)
        passes(model, ids, cache, [4096])
        torch.cuda.synchronize()
        memory = cache.memory_bytes()
        packed[offload] = sum(memory[part] for part in ("codes", "scales_zeros", "norms", "reserved"))
        torch.cuda.reset_peak_memory_stats()
        passes(model, tokens(20, seed=2)[0].cuda(), cache, [1])
        torch.cuda.synchronize()
        peaks[offload] = torch.cuda.max_memory_allocated()
        used = packed[offload] - memory["reserved"]
        del cache
    others = peaks[False] - packed[False]  # what is not packed: nearly the same for both
    assert 0.9 / 8 * used < peaks[True] - others < 2.2 / 8 * used


@pytest.mark.gpu
def test_blocks_are_page_locked() -> None:
    model = model_on("cuda")
    cache = oscar_cache(model, DEFAULT, offload=True)
    passes(model, tokens(700)[0].cuda(), cache, [300, 100])
    fork = cache.fork()
    passes(model, tokens(300)[0].cuda(), fork, [100])
    fork.batch_repeat_interleave(2)
    for state in states(fork):
        assert state.records.is_pinned() or not state.records.numel()
        assert all(piece.records.is_pinned() and piece.norms.is_pinned() for piece in state.shared.pieces)  # type: ignore[union-attr]


@pytest.mark.gpu
def test_a_stream_of_its_own_is_waited_for() -> None:
    """With the GPU kept busy, so that copies and the computation would overtake each other if they could."""
    model = model_on("cuda", num_hidden_layers=6)
    ids, rest = tokens(2000)[0].cuda(), tokens(40, seed=2)[0].cuda()
    caches = both(model, DEFAULT, torch.ones(1, 2000))
    busy = torch.randn(4096, 4096, device="cuda")
    got = []
    for cache in caches:
        forward(model, ids, cache)
        out = []
        for i in range(40):
            for _ in range(3):
                busy = (busy @ busy).clamp(-1, 1)
            out.append(forward(model, rest[:, i : i + 1], cache))
        got.append(torch.cat(out, dim=1))
    assert torch.equal(*got)
