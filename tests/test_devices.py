"""Models whose layers or weights are spread over devices, and processes whose current device is another one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import oscar_kv
from models import EXACT, dynamic_cache, forward, generate, make_model, oscar_cache, passes, tokens
from oscar_kv import DecodeGraph, OscarCache, OscarConfig
from oscar_kv.integrations.transformers import PlainMask, oscar_mask

pytestmark = pytest.mark.usefixtures("same_launches")

MODES = ("oscar", "sdpa")
LAYERS = 4
SIZES = [9, 1, 1, 60]
DEFAULT = OscarConfig()
CLOSE = {"atol": 2e-4, "rtol": 1e-4}  # fp32: sums in another order
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def device_map(of_layers: list[Any], ends: Any) -> dict[str, Any]:
    """Where the layers go, and everything else."""
    ends = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), ends)
    return ends | {f"model.layers.{i}": device for i, device in enumerate(of_layers)}


def prompts(device: Any = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Left-padded ids and mask, and what follows them, past two boundaries in every row, and the mask of all."""
    ids, mask = tokens(300, 5, 140)
    rest, own = tokens(290, 290, 290, seed=5)
    return tuple(x.to(device) for x in (ids, mask, rest, torch.cat((mask, own), dim=1)))  # type: ignore[return-value]


def run(model: PreTrainedModel, cache: OscarCache, device: Any = "cpu") -> Tensor:
    """Logits of the continuation (3, 290, vocabulary)."""
    ids, mask, rest, seen = prompts(device)
    forward(model, ids, cache, mask)
    return passes(model, rest, cache, SIZES, seen).to("cpu")


def blocks(cache: OscarCache) -> list[list[int]]:
    return [layer.state.num_blocks for layer in cache.packed_layers if layer.state is not None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", [["cpu", "disk", "disk", "cpu"], ["disk"] * LAYERS], ids=["some", "all"])
def test_weights_on_a_disk(where: list[str], mode: str, tmp_path: Path) -> None:
    """accelerate brings a layer's weights from the disk while the layer computes."""
    pytest.importorskip("accelerate")
    model = make_model(attention=mode, num_hidden_layers=LAYERS)
    model.save_pretrained(tmp_path)
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        device_map=device_map(where, "cpu"),
        offload_folder=tmp_path / "offload",
        attn_implementation=mode,
    ).eval()
    assert spread.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    _, mask, _, _ = prompts()
    for config in (EXACT, DEFAULT):
        got, want = oscar_cache(spread, config, mask), oscar_cache(model, config, mask)
        torch.testing.assert_close(run(spread, got), run(model, want), **CLOSE)
        assert blocks(got) == [[4, 2, 3]] * LAYERS
    ids, _ = tokens(100)
    with oscar_kv.enable(spread, EXACT):
        new = spread.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=180, do_sample=False)
    truth = make_model(num_hidden_layers=LAYERS)
    assert torch.equal(new, generate(truth, ids, dynamic_cache(truth), 180))


def test_a_copy_of_a_plain_mask_is_plain() -> None:
    """accelerate gives each layer a copy of the mask on its own device: the kernels take that one, too."""
    mask = oscar_mask(batch_size=2, q_length=3, kv_length=9, q_offset=6, attention_mask=torch.ones(2, 9).bool())
    assert isinstance(mask, PlainMask)
    assert isinstance(mask.to("meta"), PlainMask)
    for other in (mask.float(), mask.to(torch.float32), mask[:, :, 1:], mask & True, torch.zeros(3).to("meta")):
        assert not isinstance(other, PlainMask)


# --- on GPUs


def spread_over(model: PreTrainedModel, where: list[Any], ends: Any, main: Any = None) -> PreTrainedModel:
    """A copy of a model over several devices; with main "cpu", layers on the CPU compute there."""
    accelerate = pytest.importorskip("accelerate")
    moved: PreTrainedModel = accelerate.dispatch_model(
        copy.deepcopy(model), device_map(where, ends), main_device=main, force_hooks=True
    )
    return moved


def check_spread(model: PreTrainedModel, spread: PreTrainedModel, devices: list[str], ends: Any) -> None:
    """16 bits give the logits of one device, 2 bits nearly; every layer's tokens are where it computes."""
    exact = [run(x, oscar_cache(x, EXACT, prompts()[1]), d) for x, d in ((model, model.device), (spread, ends))]
    torch.testing.assert_close(*exact, rtol=1e-3, atol=2e-3)
    cache = oscar_cache(spread, DEFAULT, prompts()[1])
    got, want = run(spread, cache, ends), run(model, oscar_cache(model, DEFAULT, prompts()[1]), model.device)
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.95
    assert blocks(cache) == [[4, 2, 3]] * LAYERS
    assert [str(layer.device) for layer in cache.packed_layers] == devices


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_layers_on_the_cpu_and_a_gpu(mode: str) -> None:
    """A padded batch: what the layers share about the padding is where the first layer is."""
    model = make_model(attention=mode, num_hidden_layers=LAYERS)
    spread = spread_over(model, ["cpu", 0, "cpu", 0], "cpu", main="cpu")
    check_spread(model, spread, ["cpu", "cuda:0", "cpu", "cuda:0"], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_weights_on_the_cpu_of_layers_on_a_gpu(offload: bool) -> None:
    """The kernels see the same tensors: the same bits. Packed blocks may be in host memory, too."""
    model = make_model(attention="oscar", num_hidden_layers=LAYERS).to(torch.float16)
    spread = spread_over(model, ["cpu", 0, "cpu", 0], 0)
    model = model.cuda()
    got = run(spread, oscar_cache(spread, DEFAULT, offload=offload), 0)
    assert torch.equal(got, run(model, oscar_cache(model, DEFAULT), 0))


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layers_on_two_gpus(dtype: torch.dtype, mode: str, offload: bool) -> None:
    model = make_model(attention=mode, num_hidden_layers=LAYERS).to(dtype)
    spread = spread_over(model, [0, 0, 1, 1], 0)
    model = model.cuda()
    if dtype == torch.float32:
        check_spread(model, spread, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"], 0)
    ids, rest = tokens(300)[0].cuda(), tokens(290, seed=5)[0].cuda()
    logits = []
    for each in (model, spread):
        cache = oscar_cache(each, DEFAULT, offload=offload)
        forward(each, ids, cache)
        logits += [passes(each, rest, cache.fork(), SIZES), passes(each, rest, cache, SIZES)]
    assert all(torch.equal(x, logits[0]) for x in logits[1:])


@pytest.mark.gpu
@two_gpus
def test_the_current_device_is_another_one() -> None:
    """Packing, decoding, chunks, dequantizing, copies from the host and graphs, all on the tensors' device."""
    ids, rest = tokens(300)[0], tokens(290, seed=5)[0]
    found: dict[int, list[Tensor]] = {}
    for device in (0, 1):
        model = make_model(attention="sdpa").to(f"cuda:{device}", torch.float16)
        assert torch.cuda.current_device() == 0
        own_ids, own_rest = ids.to(model.device), rest.to(model.device)
        with oscar_kv.enable(model):
            out = []
            for offload in (False, True):
                cache = OscarCache(model.config, offload=offload)
                forward(model, own_ids, cache)
                out.append(passes(model, own_rest, cache, SIZES))
            cache = OscarCache(model.config, max_length=1024)
            forward(model, own_ids, cache)
            step = DecodeGraph(model, cache)
            out += [step(own_rest[:, i : i + 1]).clone() for i in range(290)]
            assert torch.cuda.current_device() == 0
        plain = oscar_cache(model, DEFAULT)
        forward(model, own_ids, plain)
        out.append(passes(model, own_rest, plain, SIZES))
        found[device] = [x.cpu() for x in out]
    for a, b in zip(*found.values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@two_gpus
def test_a_graph_over_two_devices_is_refused() -> None:
    model = make_model(attention="oscar", num_hidden_layers=LAYERS).to(torch.float16)
    spread = spread_over(model, [0, 0, 1, 1], 0)
    cache = OscarCache(spread.config, max_length=512)
    forward(spread, tokens(200)[0].cuda(), cache)
    with pytest.raises(NotImplementedError, match="one device"):
        DecodeGraph(spread, cache)


@pytest.mark.gpu
@two_gpus
def test_tokens_from_another_device_are_refused() -> None:
    model = make_model(attention="oscar").to("cuda:0", torch.float16)
    cache = oscar_cache(model, DEFAULT)
    forward(model, tokens(10)[0].cuda(), cache)
    with pytest.raises(ValueError, match="cuda:1"):
        forward(model.to("cuda:1"), tokens(3)[0].to("cuda:1"), cache)
