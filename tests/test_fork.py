"""Forks of a cache: each goes on as a fresh run would, none changes another, and all hold the prefix once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import EXACT, dynamic_cache, forward, make_model, oscar_cache, passes, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.layer import LayerState
from oscar_kv.shared import SharedBlocks

pytestmark = pytest.mark.usefixtures("same_launches")

DEFAULT = OscarConfig()
MODES = ("oscar", "sdpa")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PREFIX, MORE = 300, 290  # two blocks and some, and past two more boundaries
SIZES = [9, 1, 1, 60]
CLOSE = {"atol": 2e-4, "rtol": 1e-4}  # fp32: sums in another order


def model_on(device: str, name: str = "llama", mode: str = "oscar") -> PreTrainedModel:
    return make_model(name, attention=mode).to(device, torch.float16 if device == "cuda" else torch.float32)


def run(model: PreTrainedModel, ids: Tensor, cache: OscarCache, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    mask = None if mask is None else mask.to(model.device)
    return passes(model, ids.to(model.device), cache, sizes, mask)


def states(cache: OscarCache) -> list[LayerState]:
    return [layer.state for layer in cache.packed_layers if layer.state is not None]


def packed_bytes(*caches: OscarCache) -> int:
    """Bytes of all memory in which packed blocks lie, whatever views of it there are."""
    storages = {}
    for state in (state for cache in caches for state in states(cache)):
        pieces = [(state.records, state.norms), *((x.records, x.norms) for x in state.shared.pieces)]
        for x in (x for piece in pieces for x in piece if x is not None):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


def everything(cache: OscarCache) -> dict[str, Any]:
    return copy.deepcopy(cache.state_dict())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_each_fork_goes_on_as_a_fresh_run(name: str, mode: str, device: str) -> None:
    """Bit for bit on a CPU; on a GPU up to the order of sums in chunks, which begin anew with each piece."""
    model = model_on(device, name, mode)
    prompt, _ = tokens(PREFIX)
    step = 1 if name == "llama" else 29
    stem = oscar_cache(model, DEFAULT)
    run(model, prompt, stem, [PREFIX])
    forks = [stem.fork() for _ in range(3)]
    for seed, fork in enumerate(forks):
        ids, sizes = tokens(MORE, seed=10 + seed)[0], ([step], [7, 1, 1, 40], [150, 1, 69, 70])[seed]
        fresh = oscar_cache(model, DEFAULT)
        run(model, prompt, fresh, [PREFIX])
        want, got = run(model, ids, fresh, sizes), run(model, ids, fork, sizes)
        if device == "cpu":
            assert torch.equal(got, want)
            assert same(everything(fork), everything(fresh))
        else:
            assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.98
        assert all(state.num_blocks == [4] for state in states(fork))
        assert fork.get_seq_length() == PREFIX + MORE
    assert stem.get_seq_length() == PREFIX


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_exact_forks_give_what_a_dynamic_cache_gives(name: str, mode: str) -> None:
    model, truth = make_model(name, attention=mode), make_model(name)
    prompt, _ = tokens(PREFIX)
    stem = oscar_cache(model, EXACT)
    forward(model, prompt, stem)
    for seed in (2, 3):
        ids = torch.cat((prompt, tokens(MORE, seed=seed)[0]), dim=1)
        want = forward(truth, ids, dynamic_cache(truth))[:, PREFIX:]
        torch.testing.assert_close(passes(model, ids[:, PREFIX:], stem.fork(), [40, 1, 1, 31]), want, **CLOSE)


@pytest.mark.parametrize("max_length", [None, 900])
def test_the_prefix_is_held_once(max_length: int | None) -> None:
    """Forks add what they pack themselves, and no more than that; forks of forks, too."""
    model = model_on("cpu")
    stem = oscar_cache(model, DEFAULT, max_length=max_length)
    run(model, tokens(700)[0], stem, [700])
    prefix, room = packed_bytes(stem), sum(state.memory_bytes()["reserved"] for state in states(stem))
    per_block = (prefix - room) // 5
    forks = [stem.fork() for _ in range(4)]
    own_room = room if max_length else 0  # each may grow to the same length
    assert packed_bytes(stem, *forks) == prefix - room + 5 * own_room
    for fork in forks:
        run(model, tokens(140, seed=3)[0], fork, [1, 69, 70])
        assert sum(state.memory_bytes()["reserved"] for state in states(fork)) <= own_room
    assert packed_bytes(stem, *forks) == prefix - room + 4 * per_block * (not max_length) + 5 * own_room
    grandchildren = [fork.fork() for fork in forks for _ in range(2)]
    assert packed_bytes(stem, *forks, *grandchildren) <= prefix - room + 4 * per_block + 13 * own_room
    for cache in (stem, *forks, *grandchildren):
        assert cache.memory_bytes()["codes"] > 0
        assert packed_bytes(cache) == sum(
            size
            for state in states(cache)
            for part, size in state.memory_bytes().items()
            if part in ("codes", "scales_zeros", "norms", "reserved")
        )


def test_a_packed_prefix_is_not_copied() -> None:
    model = model_on("cpu")
    stem = oscar_cache(model, DEFAULT)
    run(model, tokens(PREFIX)[0], stem, [PREFIX])
    before = [state.records.data_ptr() for state in states(stem)]
    fork = stem.fork()
    for state, other, place in zip(states(stem), states(fork), before, strict=True):
        assert state.shared.pieces[0].records.data_ptr() == place
        assert other.shared.pieces[0].records.data_ptr() == place


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_no_fork_changes_another(name: str, device: str) -> None:
    """Whatever one of them does, the others hold the same bytes, and what shows in them later is theirs."""
    model = model_on(device, name)
    stem = oscar_cache(model, DEFAULT)
    run(model, tokens(PREFIX, PREFIX)[0], stem, [PREFIX])
    family = {"stem": stem, "child": stem.fork(), "other": stem.fork()}
    family["grandchild"] = family["child"].fork()
    for i, (name, cache) in enumerate(family.items()):
        others = {key: everything(other) for key, other in family.items() if key != name}
        run(model, tokens(MORE, MORE, seed=i)[0], cache, [1, 200, 89])
        if not any(type(layer).__name__.startswith(("Dynamic", "Linear")) for layer in cache.layers):
            cache.crop(-(cache.get_seq_length() - 128))
        cache.reorder_cache(torch.tensor([1, 0]))
        run(model, tokens(60, 60, seed=i)[0], cache, [1, 30])
        assert all(same(everything(family[key]), held) for key, held in others.items())
    family["stem"].reset()
    assert family["child"].get_seq_length() > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_fork_is_cropped_into_the_shared_blocks(mode: str) -> None:
    """To block boundaries before and at its beginning; what it packs then goes beside the shared blocks."""
    model = model_on("cpu", mode=mode)
    prompt, rest = tokens(700)[0], tokens(400, seed=4)[0]
    stem = oscar_cache(model, DEFAULT)
    run(model, prompt, stem, [700])
    held = everything(stem)
    for length in (640, 256, 128, 0):
        fork = stem.fork()
        fork.crop(length - 700)
        assert fork.get_seq_length() == length
        fresh = oscar_cache(model, DEFAULT)
        run(model, prompt, fresh, [700])
        fresh.crop(length - 700)
        assert torch.equal(run(model, rest, fork, SIZES), run(model, rest, fresh, SIZES))
        assert states(fork)[0].num_blocks == [(length + 400) // 128]
        assert same(everything(stem), held)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_unequal_lengths(mode: str) -> None:
    """All rows share the blocks that the shortest has; the others' are copied."""
    model = model_on("cpu", mode=mode)
    ids, mask = tokens(600, 150, 320)
    stem = oscar_cache(model, DEFAULT, mask)
    run(model, ids, stem, [600], mask)
    fork = stem.fork()
    assert [state.first for state in states(fork)] == [1, 1]
    rest, own = tokens(MORE, MORE, MORE, seed=2)
    seen = torch.cat((mask, own), dim=1)
    fresh = oscar_cache(model, DEFAULT, mask)
    run(model, ids, fresh, [600], mask)
    assert torch.equal(run(model, rest, fork, SIZES, seen), run(model, rest, fresh, SIZES, seen))
    assert states(fork)[0].num_blocks == [6, 3, 4]
    assert same(everything(fork), everything(fresh))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_copies_of_an_only_row_share_its_blocks(mode: str, device: str) -> None:
    """A batch of continuations of one prompt holds the prompt once, and each row goes on as alone."""
    model = model_on(device, mode=mode)
    prompt, rest = tokens(PREFIX)[0], tokens(*[MORE] * 4, seed=6)[0]
    ones = torch.ones(1, PREFIX)
    cache, alone = oscar_cache(model, DEFAULT, ones), oscar_cache(model, DEFAULT, ones)
    run(model, prompt, cache, [PREFIX])
    run(model, prompt, alone, [PREFIX])
    before = packed_bytes(cache)
    cache.batch_repeat_interleave(4)
    assert packed_bytes(cache) == before
    cache.reorder_cache(torch.tensor([2, 1, 0, 3]))  # as beam search does: nothing is copied
    assert packed_bytes(cache) == before
    got = run(model, rest, cache, SIZES)
    assert all(state.num_blocks == [4] * 4 for state in states(cache))
    for row in range(4):
        want = run(model, rest[row : row + 1], alone.fork(), SIZES)
        if device == "cpu":
            torch.testing.assert_close(got[row : row + 1], want, **CLOSE)
        else:
            assert (got[row : row + 1].argmax(-1) == want.argmax(-1)).float().mean() > 0.98
    cache.batch_select_indices(torch.tensor([3]))
    assert cache.memory_bytes()["total"] > 0


def test_many_generations_of_forks() -> None:
    """A fork of a fork, twelve times with a block each: pieces are joined, and nothing is lost."""
    model = model_on("cpu")
    ids = tokens(128 * 12 + 40)[0]
    cache, truth = oscar_cache(model, DEFAULT), oscar_cache(model, DEFAULT)
    line = [cache]
    for start in range(0, ids.shape[1], 128):
        run(model, ids[:, start : start + 128], line[-1], [128])
        run(model, ids[:, start : start + 128], truth, [128])
        line.append(line[-1].fork())
    assert all(len(state.shared.pieces) <= 8 and state.first == 12 for state in states(line[-1]))
    assert same(everything(line[-1]), everything(truth))
    rest = tokens(30, seed=9)[0]
    assert torch.equal(run(model, rest, line[-1], [10]), run(model, rest, truth, [10]))


def test_forks_while_recording_and_of_an_empty_cache() -> None:
    model = model_on("cpu")
    cache = oscar_cache(model, DEFAULT)
    early = cache.fork()
    cache.activate_past_recording()
    run(model, tokens(390)[0], cache, [390])
    fork = cache.fork()
    for other in (cache, fork):
        other.crop(-120)
    rest = tokens(140, seed=2)[0]
    assert torch.equal(run(model, rest, fork, [1]), run(model, rest, cache, [1]))
    assert early.get_seq_length() == 0
    run(model, rest, early, [140])
    assert early.get_seq_length() == 140


def test_a_fork_in_the_middle_of_a_pass_is_refused() -> None:
    model = model_on("cpu")
    cache = oscar_cache(model, DEFAULT)
    keys = torch.zeros(1, 2, 3, 32)
    cache.update(keys, keys, 0)
    with pytest.raises(RuntimeError, match="middle of a pass"):
        cache.fork()


@pytest.mark.gpu
@torch.inference_mode()
def test_a_fork_decodes_as_a_cuda_graph() -> None:
    """Also beside its parent, which has a graph of its own."""
    import oscar_kv
    from oscar_kv import DecodeGraph

    model = make_model(attention="sdpa").to("cuda", torch.float16)
    prompt, rest = tokens(PREFIX)[0].cuda(), tokens(MORE, seed=5)[0].cuda()
    with oscar_kv.enable(model):
        stem = OscarCache(model.config, max_length=1024)
        run(model, prompt, stem, [PREFIX])
        step = DecodeGraph(model, stem)
        step(rest[:, :1])
        fork, eager = stem.fork(), stem.fork()
        steps = step, DecodeGraph(model, fork)
        for i in range(1, MORE):
            want = run(model, rest[:, i : i + 1], eager, [1])[:, -1]
            for each in steps:
                torch.testing.assert_close(each(rest[:, i : i + 1]), want, rtol=0.0, atol=0.0)
    for a, b in zip(states(fork), states(eager), strict=True):
        assert a.num_blocks == b.num_blocks == [4]
        assert torch.equal(a.records[:, :2], b.records[:, :2])


def test_pieces_are_found() -> None:
    """The first blocks of pieces, and rows of them, against one tensor of all blocks."""
    generator = torch.Generator().manual_seed(0)
    from oscar_kv.codec import PackedBlocks

    whole = torch.randint(0, 256, (3, 9, 2, 16), dtype=torch.uint8, generator=generator)
    shared = SharedBlocks()
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        shared = shared.followed_by(PackedBlocks(whole[:, start:stop], None))
    for count in range(10):
        parts = list(shared.first(count).expanded(3))
        assert torch.equal(torch.cat([whole[:, :0], *(x.records for x in parts)], dim=1), whole[:, :count])
    rows = torch.tensor([2, 2, 0, 1])
    assert torch.equal(torch.cat([x.records for x in shared.select(rows).expanded(4)], dim=1), whole[rows])
