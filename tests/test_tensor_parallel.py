"""Tensor parallelism by transformers on two CPU ranks: each packs its own heads."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import oscar_kv
from models import EXACT, forward, make_model, oscar_cache, passes, tokens
from oscar_kv import OscarCache, OscarConfig

RANKS = 2
SIZES = [9, 1, 1, 60]  # past two boundaries in 290 tokens
CONFIGS = {"exact": EXACT, "default": OscarConfig(), "per_head": OscarConfig(scale_scope="head")}
MODES = ("oscar", "sdpa")

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def model_in(mode: str) -> PreTrainedModel:
    return make_model(attention=mode, vocab_size=98)  # a number that two ranks can share


def logits_of(model: PreTrainedModel, config: OscarConfig) -> tuple[Tensor, OscarCache]:
    """A prompt and its continuation: logits (1, 590, vocabulary)."""
    cache = oscar_cache(model, config)
    first = forward(model, tokens(300)[0], cache)
    return torch.cat((first, passes(model, tokens(290, seed=5)[0], cache, SIZES)), dim=1), cache


def records(cache: OscarCache, layer: int) -> Tensor:
    """(1, blocks, heads, record bytes)"""
    state = cache.packed_layers[layer].state
    assert state is not None
    assert state.num_blocks == [4]
    return state.records[:, :4]


def rank_main(rank: int, folder: str, port: int) -> None:
    """What each process does: load its share of the model, run it, and write what it found."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    oscar_kv.register()
    found = {}
    for mode in MODES:
        model = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_size=RANKS), attn_implementation=mode
        ).eval()
        for name, config in CONFIGS.items():
            logits, cache = logits_of(model, config)
            found[mode, name] = {"logits": logits, "records": records(cache, 0).clone()}
    torch.save(found, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Tensor]]]:
    """What the ranks found."""
    folder = tmp_path_factory.mktemp("model")
    model_in("sdpa").save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, (str(folder), port), nprocs=RANKS)
    return [torch.load(Path(folder, f"rank{rank}.pt")) for rank in range(RANKS)]


@pytest.mark.parametrize("mode", MODES)
def test_sixteen_bits_give_the_logits_of_one_process(ranks: list[dict], mode: str) -> None:
    want, _ = logits_of(model_in(mode), EXACT)
    for found in ranks:
        torch.testing.assert_close(found[mode, "exact"]["logits"], want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["default", "per_head"])
def test_two_bits_differ_by_their_own_noise(ranks: list[dict], name: str, mode: str) -> None:
    """No further from 16 bits than one process is; all ranks have the same logits."""
    model = model_in(mode)
    exact, _ = logits_of(model, EXACT)
    alone, _ = logits_of(model, CONFIGS[name])
    for found in ranks:
        together = found[mode, name]["logits"]
        assert torch.equal(together, ranks[0][mode, name]["logits"])
        assert torch.equal(together[:, :300].argmax(-1), exact[:, :300].argmax(-1))  # the first pass is exact
        noise, difference = ((x - exact)[:, 300:].square().mean().sqrt() for x in (alone, together))
        assert noise > 0
        assert difference < 1.3 * noise


@pytest.mark.parametrize("mode", MODES)
def test_each_rank_packs_its_heads(ranks: list[dict], mode: str) -> None:
    """The bytes of one process where norms are per head; where they are over all heads, a rank has fewer."""
    model = model_in(mode)
    for name, same in (("per_head", True), ("default", False)):
        whole = records(logits_of(model, CONFIGS[name])[1], 0)
        parts = [found[mode, name]["records"] for found in ranks]
        assert all(part.shape[2] == whole.shape[2] // RANKS for part in parts)
        equal = (torch.cat(parts, dim=2) == whole).float().mean()
        assert (equal > 0.999) == same
