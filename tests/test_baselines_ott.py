"""OTT against a plain loop over blocks and heads, written from the paper's description."""

import pytest
import torch

from baseline_cases import EXACT, assert_same_codes, fill, round_to_nearest, states, steps_of
from oscar_kv.baselines import OTT

TOKENS, BLOCK = 470, 128  # three blocks, 32 tokens of tail and an odd rest
PACKED = 384


def trace(keys, pool_size, evicted_size):
    """One head: the traced tokens of each block, and all tokens that are exact in the end; keys (tokens, dim)."""
    pool, evicted, per_block, stopped = [], [], [], False
    for start in range(0, len(keys), BLOCK):
        block = list(range(start, start + BLOCK))
        size = {t: float(keys[t].abs().sum()) for t in pool + block}
        new_pool = sorted(size, key=size.get)[:pool_size]
        out = [t for t in pool if t not in new_pool]
        if stopped or len(evicted) + len(out) > evicted_size:
            stopped = True
            per_block.append([])
            continue
        per_block.append([t for t in new_pool if t in block])
        pool, evicted = new_pool, evicted + out
    return per_block, pool, evicted


def expected(keys, values, group, per_block, exact):
    """One head in float64: packed tokens with the exact ones in their places, and the steps of the groups."""
    out_k, out_v, steps_k, steps_v = [], [], [], []
    for i, traced in enumerate(per_block):
        part = slice(BLOCK * i, BLOCK * (i + 1))
        k, v = keys[part].clone(), values[part].clone()
        inside = [t - BLOCK * i for t in traced]
        others = [t for t in range(BLOCK) if t not in inside]
        for x in (k, v):
            x[inside] = x[others].mean(0)
        out_k.append(round_to_nearest(k.T, 2, group).T)
        steps_k.append(steps_of(k.T, 2, group).T)
        size = min(group, v.shape[1])
        out_v.append(round_to_nearest(v, 2, size))
        steps_v.append(steps_of(v, 2, size))
    k, v = torch.cat(out_k), torch.cat(out_v)
    k[exact], v[exact] = keys[exact], values[exact]
    return k, v, torch.cat(steps_k), torch.cat(steps_v)


@pytest.mark.parametrize(("group", "pool", "evicted"), [(128, 3, 32), (32, 5, 32), (128, 6, 2), (128, 0, 32)], ids=str)
def test_ott(group, pool, evicted):
    keys, values = states(TOKENS, heads=3)
    keys[:, 1] *= torch.linspace(2, 0.5, TOKENS).unsqueeze(1)  # of this head, every block evicts the pool
    method = OTT(group=group, pool=pool, evicted=evicted, **EXACT)
    cache, k, v = fill(method, keys, values, [131, 1, 70], layer=2)
    assert torch.equal(k[:, :, PACKED:], keys[:, :, PACKED:])
    traced_at_all = 0
    for head in range(3):
        own = keys[0, head, :PACKED].double(), values[0, head, :PACKED].double()
        per_block, in_pool, out = trace(own[0], pool, evicted)
        traced_at_all += len(out)
        want_k, want_v, steps_k, steps_v = expected(*own, group, per_block, in_pool + out)
        assert_same_codes(k[0, head, :PACKED], want_k, steps_k)
        assert_same_codes(v[0, head, :PACKED], want_v, steps_v)
    assert (traced_at_all > 0) == (pool > 0)
    assert cache.packed_bits() == pytest.approx(2 + (64 / group + 64 / min(group, 64)) / 2)


def test_the_first_layers_trace_nothing():
    keys, values = states(TOKENS)
    cache, k, _ = fill(OTT(**EXACT), keys, values, [TOKENS], layer=1)
    want = round_to_nearest(keys[:, :, :PACKED].transpose(2, 3), 2, 128).transpose(2, 3)
    assert_same_codes(k[:, :, :PACKED], want, steps_of(keys[:, :, :PACKED].transpose(2, 3), 2, 128).transpose(2, 3))
    assert cache.memory_bytes()["state"] == 0


def test_exact_tokens_are_counted():
    keys, values = (x.bfloat16() for x in states(TOKENS, heads=1))
    cache, _, _ = fill(OTT(), keys, values, [TOKENS], layer=2)
    _, pool, evicted = trace(keys[0, 0, :PACKED].float(), 3, 32)
    count = len(pool + evicted)
    entry = 4 + 1 + 2 * 64 * 2  # column, whether in the pool, key and value in 16 bit
    memory = cache.memory_bytes()
    assert memory["state"] == count * entry + 1
    assert memory["tail"] == (TOKENS - PACKED) * 2 * 64 * 2
    assert memory["codes"] == PACKED * 2 * 64 // 4
    assert memory["scales_zeros"] == PACKED // 128 * 64 * 4 + PACKED * 4


def test_the_group_divides_the_block():
    with pytest.raises(ValueError, match="divide"):
        OTT(group=256)
