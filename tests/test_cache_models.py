"""OscarCache in real models: the same tokens as transformers' DynamicCache at 16 bits, and what must hold at 2 bits.

Every comparison is with a DynamicCache, with a pass over the whole sequence without any cache, or with the same row
alone in its batch.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache as remember
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from models import (
    CONFIGS,
    EXACT,
    PLAIN,
    VOCAB,
    dynamic_cache,
    exact_first_layer,
    forward,
    generate,
    make_model,
    oscar_cache,
    passes,
    tokens,
)
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

pytestmark = pytest.mark.filterwarnings("ignore:nothing to quantize")

MODELS = ("llama", "qwen3", "qwen2", "mistral", "gemma3", "phi3")
MODES = ("oscar", "sdpa")  # packed bytes read as they are, or dequantized
# Mistral is not packed, whatever the mode
MODELS_AND_MODES = [(name, mode) for name in MODELS for mode in MODES if (name, mode) != ("mistral", "sdpa")]
EIGHT_BIT = OscarConfig(
    key_bits=8, value_bits=8, metadata="float16", key_shrink=1.0, value_shrink=1.0, value_fit="minmax"
)
# fp32: sums of up to some hundred terms in another order, through up to three layers, for logits of size 1 to 10
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def pair(name: str, mode: str, **overrides: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same weights twice: to run an OscarCache in this mode, and for the truth."""
    truth = "sdpa" if mode == "oscar" else mode
    return make_model(name, attention=mode, **overrides), make_model(name, attention=truth, **overrides)


def check_blocks(cache: OscarCache, *rows: int) -> None:
    """The packed blocks of each row, in every packed layer: the test crossed the boundaries that it meant to."""
    for layer in cache.packed_layers:
        assert layer.state is not None
        assert layer.state.num_blocks == list(rows)


def rows_alone(model: PreTrainedModel, ids: Tensor, mask: Tensor, new: int) -> list[Tensor]:
    """New tokens of each row, generated alone and without padding."""
    alone = [row[own.bool()].unsqueeze(0) for row, own in zip(ids, mask, strict=True)]
    return [generate(model, row, dynamic_cache(model), new)[0, row.shape[1] :] for row in alone]


@remember
def padded_truth(name: str, attention: str) -> tuple[Tensor, list[Tensor]]:
    """New tokens of the padded batch of 300, 5 and 150 tokens with a DynamicCache: together, and each row alone."""
    model = make_model(name, attention=attention)
    ids, mask = tokens(300, 5, 150)
    new = 260 if name in ("llama", "gemma3") else 115  # the shortest row passes both boundaries, or the others do
    together = generate(model, ids, dynamic_cache(model), new, mask)[:, 300:]
    return together, rows_alone(model, ids, mask, new)


# --- 16 bits: the tokens of a DynamicCache


@pytest.mark.parametrize("mode", [*MODES, "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy(name: str, mode: str) -> None:
    model, truth = pair(name, mode)
    ids, _ = tokens(220)
    options = {"return_dict_in_generate": True, "output_logits": True}
    want: Any = generate(truth, ids, dynamic_cache(truth), 60, **options)
    cache = oscar_cache(model)
    got: Any = generate(model, ids, cache, 60, **options)
    assert len(set(want.sequences[0, 220:].tolist())) > 10  # the model does not loop: its history matters
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), **CLOSE)
    check_blocks(cache, 2)


def test_sliding_window_is_left_unpacked() -> None:
    model = make_model("mistral")
    with pytest.warns(UserWarning, match="nothing to quantize"):
        cache = OscarCache(model.config)
    assert cache.packed_layers == []
    assert all(cache.is_sliding)


def test_only_full_attention_is_packed() -> None:
    cache = oscar_cache(make_model("gemma3"))
    assert cache.is_sliding == [True, False, False]
    assert len(cache.packed_layers) == 2


@pytest.mark.parametrize(
    ("name", "mode"), [("lfm2", "oscar"), ("lfm2", "sdpa"), ("gemma4", "oscar"), ("gemma4", "sdpa")]
)
def test_other_layers_stay_as_they_are(name: str, mode: str) -> None:
    """Convolutions, and layers that share another's keys and values, beside packed layers."""
    model, truth = pair(name, mode)
    ids, mask = tokens(250, 100)
    want = generate(truth, ids, dynamic_cache(truth), 40, mask)
    cache = oscar_cache(model, mask=mask)
    assert torch.equal(generate(model, ids, cache, 40, mask), want)
    check_blocks(cache, 2, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3])
def test_sampling(mode: str, rows: int) -> None:
    """The same seed gives the same tokens; n > 1 sequences of one prompt go their own ways."""
    model, truth = pair("llama", mode)
    ids, mask = tokens(200)
    got = []
    for runner, cache in ((truth, dynamic_cache(truth)), (model, oscar_cache(model, mask=mask))):
        torch.manual_seed(7)
        got.append(generate(runner, ids, cache, 90, mask, do_sample=True, top_k=0, num_return_sequences=rows))
    assert torch.equal(*got)
    assert len({tuple(row) for row in got[0].tolist()}) == rows
    check_blocks(cache, *[2] * rows)


@pytest.mark.parametrize(("name", "mode"), MODELS_AND_MODES)
def test_beam_search(name: str, mode: str) -> None:
    model, truth = pair(name, mode)
    ids, mask = tokens(30)
    want = generate(truth, ids, dynamic_cache(truth), 300, num_beams=4)
    cache = oscar_cache(model, mask=mask)
    assert torch.equal(generate(model, ids, cache, 300, num_beams=4), want)
    check_blocks(cache, *[2] * 4)


@pytest.mark.parametrize("mode", MODES)
def test_beam_search_of_a_padded_batch(mode: str) -> None:
    """Rows of unequal length are reordered and pack their blocks at different times."""
    model, truth = pair("llama", mode)
    ids, mask = tokens(150, 30)
    want = generate(truth, ids, dynamic_cache(truth), 120, mask, num_beams=3, num_return_sequences=2)
    got = generate(model, ids, oscar_cache(model, mask=mask), 120, mask, num_beams=3, num_return_sequences=2)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("name", "mode"), MODELS_AND_MODES)
def test_padded_batch(name: str, mode: str) -> None:
    """Each row of a left-padded batch gives what it gives with a DynamicCache, in this batch and alone."""
    together, alone = padded_truth(name, "sdpa")
    model = make_model(name, attention=mode)
    ids, mask = tokens(300, 5, 150)
    cache = oscar_cache(model, mask=mask)
    new = together.shape[1]
    got = generate(model, ids, cache, new, mask)[:, 300:]
    assert torch.equal(got, together)
    for row, want in zip(got, alone, strict=True):
        assert torch.equal(row, want)
    check_blocks(cache, *[(n + new - 1) // 128 for n in (300, 5, 150)])


def test_padded_batch_eager() -> None:
    together, _ = padded_truth("llama", "eager")
    model = make_model("llama", attention="eager")
    ids, mask = tokens(300, 5, 150)
    assert torch.equal(generate(model, ids, oscar_cache(model, mask=mask), 260, mask)[:, 300:], together)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chunked_prefill(name: str, mode: str) -> None:
    model, truth = pair(name, mode)
    ids, mask = tokens(330, 190)
    want = generate(truth, ids, dynamic_cache(truth), 80, mask)
    cache = oscar_cache(model, mask=mask)
    assert torch.equal(generate(model, ids, cache, 80, mask, prefill_chunk_size=100), want)
    check_blocks(cache, 3, 2)


@pytest.mark.parametrize("lengths", [(225,), (225, 5, 105)], ids=["one", "padded"])
@pytest.mark.parametrize(("name", "mode"), MODELS_AND_MODES)
def test_second_turn(name: str, mode: str, lengths: tuple[int, ...]) -> None:
    """The cache is fed back with the conversation so far and a question; so is a DynamicCache."""
    model, truth = pair(name, mode)
    ids, mask = tokens(*lengths)
    question, _ = tokens(*[11] * len(lengths), seed=2)
    caches: tuple[Cache, Cache] = (dynamic_cache(truth), oscar_cache(model, mask=mask))
    got = []
    for runner, cache in zip((truth, model), caches, strict=True):
        first = generate(runner, ids, cache, 10, mask)
        asked = torch.cat((first, question), dim=1)
        seen = torch.cat((mask, torch.ones_like(asked[:, ids.shape[1] :])), dim=1)
        got.append(generate(runner, asked, cache, 20, seen))
    assert torch.equal(*got)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == got[0].shape[1] - 1
    assert isinstance(caches[1], OscarCache)
    check_blocks(caches[1], *[(n + 10 + 11 + 19) // 128 for n in lengths])


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_second_turn_of_unequal_length(name: str, mode: str, told: bool) -> None:
    """Padding in the middle of the rows: each row's logits are those of its tokens alone, without any cache.

    Without attention "oscar" the cache knows of the second padding only where its mask was made with it. A sliding
    window counts columns, padding included, so that Gemma's truth is the same batch with a DynamicCache.
    """
    model, truth = pair(name, mode)
    parts = [tokens(300, 5, 150), tokens(20, 20, 20, seed=2), tokens(40, 7, 140, seed=3), tokens(*[240] * 3, seed=4)]
    ids, mask = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    cache = oscar_cache(model, mask=mask if told else parts[0][1])
    sizes = [300, *[1] * 20, 140, 5, 1, 40]
    got = passes(model, ids, cache, sizes, mask)
    if name == "llama":
        for row, own, logits in zip(ids, mask.bool(), got, strict=True):
            torch.testing.assert_close(logits[own], forward(truth, row[own].unsqueeze(0), None)[0], **CLOSE)
    else:
        want = passes(truth, ids, dynamic_cache(truth), sizes, mask)
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], **CLOSE)
    if mode == "oscar" or told:
        check_blocks(cache, *(mask.sum(-1) // 128).tolist())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "spread", "least", "most"),
    [("llama", 0.2, 120, 170), ("llama", 0.08, 20, 70), ("gemma3", 0.2, 60, 165)],
    ids=["rejected", "accepted", "gemma3"],
)
def test_prompt_lookup(name: str, spread: float, least: int, most: int, mode: str) -> None:
    """Candidates that are rejected are rolled back, across block boundaries too; those of a looping model are not.

    ``least`` and ``most`` bound the passes for 170 tokens: how many candidates were accepted.
    """
    model, truth = pair(name, mode, initializer_range=spread)
    ids = tokens(20)[0].repeat(1, 5)
    want = generate(truth, ids, dynamic_cache(truth), 170)
    cache = oscar_cache(model)
    with counted_passes(model) as count:
        got = generate(model, ids, cache, 170, prompt_lookup_num_tokens=8)
    assert torch.equal(got, want)
    assert least < count() < most
    assert all(layer.state is not None and layer.state.num_blocks[0] > 0 for layer in cache.packed_layers)


@pytest.mark.parametrize("assistant", ["smaller", "noisy"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_assisted(name: str, mode: str, assistant: str) -> None:
    """A smaller model whose guesses are rejected, and a noisy copy of which some are accepted."""
    if (name, assistant) == ("gemma3", "noisy") and CACHE_ARGUMENT != "cache":
        pytest.skip("before 5.24 transformers fails by itself with an assistant that has sliding layers")
    model, truth = pair(name, mode)
    if assistant == "smaller":
        helper = make_model("llama", seed=5, num_hidden_layers=1)
    else:
        helper = copy.deepcopy(truth)
        torch.manual_seed(3)
        with torch.no_grad():
            helper.lm_head.weight.add_(0.05 * torch.randn_like(helper.lm_head.weight))
    ids, _ = tokens(235)
    want = generate(truth, ids, dynamic_cache(truth), 60)
    with counted_passes(model) as count:
        got = generate(model, ids, oscar_cache(model), 60, assistant_model=helper)
    assert torch.equal(got, want)
    assert count() > 45 if assistant == "smaller" else 8 < count() < 45


@contextmanager
def counted_passes(model: PreTrainedModel) -> Iterator[Callable[[], int]]:
    """Counts the forward passes of a model."""
    count = 0

    def add(*_: Any) -> None:
        nonlocal count
        count += 1

    hook = model.register_forward_pre_hook(add)
    yield lambda: count
    hook.remove()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 31, 32, 127, 128, 129, 255, 256, 257])
def test_prompt_length(length: int, mode: str) -> None:
    """The prompt's logits, 40 greedy tokens and theirs, and those of what follows, beyond the second block boundary."""
    model, truth = pair("llama", mode)
    ids, _ = tokens(length)
    options = {"return_dict_in_generate": True, "output_logits": True}
    want: Any = generate(truth, ids, dynamic_cache(truth), 40, **options)
    cache = oscar_cache(model)
    torch.testing.assert_close(forward(model, ids, cache), forward(truth, ids, None), **CLOSE)
    cache.reset()
    got: Any = generate(model, ids, cache, 40, **options)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), **CLOSE)
    start = cache.get_seq_length()
    ids = torch.cat((ids, got.sequences[:, length:], tokens(300, seed=2)[0]), dim=1)[:, :300]
    logits = passes(model, ids[:, start:], cache, [1, 1, max(1, 300 - start - 5), 1])
    torch.testing.assert_close(logits, forward(truth, ids, None)[:, start:], **CLOSE)
    check_blocks(cache, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("num_sinks", "residual_length", "blocks"), [(0, 128, (3, 2)), (127, 128, (3, 2)), (4, 256, (2, 1))]
)
def test_sinks_and_residual_length(mode: str, num_sinks: int, residual_length: int, blocks: tuple[int, int]) -> None:
    model, truth = pair("llama", mode)
    config = OscarConfig(key_bits=16, value_bits=16, num_sinks=num_sinks, residual_length=residual_length)
    ids, mask = tokens(370, 250)
    want = generate(truth, ids, dynamic_cache(truth), 40, mask)
    cache = oscar_cache(model, config, mask)
    assert torch.equal(generate(model, ids, cache, 40, mask), want)
    check_blocks(cache, *blocks)


@pytest.mark.parametrize("sizes", [(300, 1), (100,), (1,), (3, 130, 128, 5, 127)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_passes_of_any_size(mode: str, sizes: tuple[int, ...]) -> None:
    """Logits of every column are those of one pass without a cache, however the columns are fed."""
    model, truth = pair("llama", mode)
    ids, _ = tokens(393)
    cache = oscar_cache(model)
    torch.testing.assert_close(passes(model, ids, cache, sizes), forward(truth, ids, None), **CLOSE)
    check_blocks(cache, 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_are_rearranged(name: str, mode: str) -> None:
    """Repeat, reorder and select rows of unequal length, over block boundaries: as with a DynamicCache."""
    model, truth = pair(name, mode)
    ids, mask = tokens(140, 60)
    caches = (dynamic_cache(truth), oscar_cache(model, mask=mask))

    def check(columns: int, seed: int) -> None:
        nonlocal mask
        new, own = tokens(*[columns] * mask.shape[0], seed=seed)
        mask = torch.cat((mask, own), dim=1)
        want, got = (forward(m, new, cache, mask) for m, cache in zip((truth, model), caches, strict=True))
        torch.testing.assert_close(got, want, **CLOSE)

    want, got = (forward(m, ids, cache, mask) for m, cache in zip((truth, model), caches, strict=True))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], **CLOSE)
    check(10, 2)
    for cache in caches:
        cache.batch_repeat_interleave(2)  # a a b b
    mask = mask.repeat_interleave(2, 0)
    check(100, 3)
    order = torch.tensor([3, 0, 1, 1])  # b a a a
    for cache in caches:
        cache.reorder_cache(order)
    mask = mask[order]
    check(1, 4)
    check(90, 5)
    keep = torch.tensor([2, 0])  # a b
    for cache in caches:
        cache.batch_select_indices(keep)
    mask = mask[keep]
    check(1, 6)
    check(60, 7)
    check(1, 8)
    check_blocks(caches[1], 3, 2)  # of 403 and 323 tokens


@pytest.mark.parametrize("change", ["reorder", "select", "repeat"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_quantized_rows_are_rearranged(config: OscarConfig, mode: str, change: str) -> None:
    """Everything that belongs to a row goes with it: the row answers as it would have in its old place."""
    model = make_model(attention=mode)
    ids, mask = tokens(300, 130, 200)
    new, own = tokens(60, 60, 60, seed=2)
    cache = oscar_cache(model, config, mask)
    forward(model, ids, cache, mask)
    stay = copy.deepcopy(cache)
    seen = torch.cat((mask, own), dim=1)
    want = passes(model, new, stay, [1, 58, 1], seen)
    check_blocks(stay, 2, 1, 2)
    if change == "reorder":
        order = torch.tensor([2, 0, 0])
        cache.reorder_cache(order)
    elif change == "select":
        order = torch.tensor([2, 1])
        cache.batch_select_indices(order)
    else:
        order = torch.tensor([0, 0, 1, 1, 2, 2])
        cache.batch_repeat_interleave(2)
    got = passes(model, new[order], cache, [1, 58, 1], seen[order])
    torch.testing.assert_close(got[:, :1], want[order][:, :1], **CLOSE)
    # another batch size rounds otherwise, which may move a code of a new block: far less than a wrong row
    assert (got - want[order]).abs().mean() < 1e-3
    assert cache.packed_layers[0].state is not None
    assert cache.packed_layers[0].state.num_blocks == [[2, 1, 2][row] for row in order]


@pytest.mark.parametrize(
    "indices", [torch.tensor([True, False, True]), torch.tensor([-1, 0])], ids=["bool", "negative"]
)
@pytest.mark.parametrize("mode", MODES)
def test_rows_are_selected_like_a_tensor(mode: str, indices: Tensor) -> None:
    """Whatever indexes a DynamicCache's rows indexes these."""
    model, truth = pair("llama", mode)
    ids, mask = tokens(300, 5, 150)
    more, own = tokens(4, 4, seed=2)
    got = []
    for runner, cache in ((truth, dynamic_cache(truth)), (model, oscar_cache(model, mask=mask))):
        forward(runner, ids, cache, mask)
        cache.batch_select_indices(indices)
        got.append(forward(runner, more, cache, torch.cat((mask[indices], own), dim=1)))
    torch.testing.assert_close(got[1], got[0], **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_an_empty_cache(mode: str) -> None:
    """As with a DynamicCache there is nothing to rearrange, and nothing happens."""
    cache = oscar_cache(make_model(attention=mode))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(0)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_reset(name: str, mode: str) -> None:
    """As good as new: rows of another number, and of other lengths."""
    model, truth = pair(name, mode)
    cache = oscar_cache(model)
    for length in (300, 129, 270):
        ids, _ = tokens(length, seed=length)
        torch.testing.assert_close(passes(model, ids, cache, [length - 10, 1]), forward(truth, ids, None), **CLOSE)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert not cache.is_initialized or name == "gemma3"
    if mode == "oscar":
        ids, mask = tokens(300, 140)
        got = passes(model, ids, cache, [290, 1], mask)
        torch.testing.assert_close(got[mask.bool()], forward(truth, ids, None, mask)[mask.bool()], **CLOSE)
        check_blocks(cache, 2, 1)


@pytest.mark.parametrize("mode", MODES)
def test_reset_forgets_the_padding(mode: str) -> None:
    """The mask belonged to prompts that are gone. Another batch wants its own."""
    model, truth = pair("llama", mode)
    ids, mask = tokens(140, 60)
    cache = oscar_cache(model, mask=mask)
    forward(model, ids, cache, mask)
    cache.reset()
    ids, mask = tokens(300, 290)
    if mode == "sdpa":
        with pytest.raises(ValueError, match="attention_mask"):
            forward(model, ids, cache, mask)
        cache.reset()
        ids, mask = ids[:1], mask[:1]
    got = passes(model, ids, cache, [290, 1], mask)
    torch.testing.assert_close(got[mask.bool()], forward(truth, ids, None, mask)[mask.bool()], **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_crop(mode: str) -> None:
    """Back inside the tail, to a block boundary and to nothing: then as if the tokens had never been there."""
    model, truth = pair("llama", mode)
    cache, ids = oscar_cache(model), torch.zeros(1, 0, dtype=torch.long)

    def check(columns: int, seed: int) -> None:
        nonlocal ids
        start = ids.shape[1]
        ids = torch.cat((ids, tokens(columns, seed=seed)[0]), dim=1)
        got = forward(model, ids[:, start:], cache)
        torch.testing.assert_close(got, forward(truth, ids, None)[:, start:], **CLOSE)

    def crop(columns: int, *blocks: int) -> None:
        nonlocal ids
        cache.crop(-columns)
        ids = ids[:, : ids.shape[1] - columns]
        assert cache.get_seq_length() == ids.shape[1]
        check_blocks(cache, *blocks)

    check(300, 1)
    check(30, 2)
    crop(50, 2)  # 280
    check(1, 3)
    check(110, 4)  # 391
    crop(5, 3)  # 386
    crop(2, 3)  # 384: the tail is empty
    check(1, 5)
    crop(129, 2)  # 256, from 385: a whole block goes
    check(150, 6)  # 406
    crop(0, 3)
    crop(406, 0)
    check(260, 7)
    check(1, 8)
    check_blocks(cache, 2)


@pytest.mark.parametrize("mode", MODES)
def test_crop_while_recording(mode: str) -> None:
    """After ``activate_past_recording`` up to 128 tokens come back off, wherever the block boundaries are."""
    model, truth = pair("llama", mode)
    ids, mask = tokens(350, 280)
    cache = oscar_cache(model, mask=mask)
    cache.activate_past_recording()
    forward(model, ids, cache, mask)
    for turn, (columns, remove) in enumerate([(20, 20), (9, 8), (128, 128), (130, 127), (1, 0), (100, 60), (3, 1)]):
        new, own = tokens(columns, columns, seed=turn)
        ids, mask = torch.cat((ids, new), dim=1), torch.cat((mask, own), dim=1)
        got = forward(model, new, cache, mask)
        for row in range(2):
            want = forward(truth, ids[row, mask[row].bool()].unsqueeze(0), None)
            torch.testing.assert_close(got[row], want[0, -columns:], **CLOSE)
        cache.crop(-remove)
        ids, mask = ids[:, : ids.shape[1] - remove], mask[:, : mask.shape[1] - remove]
        assert cache.get_seq_length() == ids.shape[1]
    assert ids.shape[1] == 350 + 1 + 3 + 1 + 40 + 2
    states = [layer.state for layer in cache.packed_layers]
    assert all(state is not None and min(state.num_blocks) >= 1 for state in states)


@pytest.mark.parametrize("mode", MODES)
def test_crop_takes_back_several_passes_while_recording(mode: str) -> None:
    """ "Up to 128 of them" holds for the newest tokens, however many passes they came in."""
    model, truth = pair("llama", mode)
    ids, _ = tokens(280)
    cache = oscar_cache(model)
    cache.activate_past_recording()
    passes(model, ids[:, :262], cache, [240, 1])
    cache.crop(-20)
    got = passes(model, ids[:, 242:], cache, [1])
    torch.testing.assert_close(got, forward(truth, ids, None)[:, 242:], **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_crop_of_sliding_and_full_layers_is_all_or_nothing(mode: str) -> None:
    """A window that has moved on cannot go back; the full layers must not either, and the cache goes on."""
    layers = ["full_attention", "sliding_attention", "full_attention"]
    model, truth = pair("gemma3", mode, layer_types=layers)
    ids, _ = tokens(301)
    cache = oscar_cache(model)
    passes(model, ids[:, :300], cache, [290, 10])
    with pytest.raises((RuntimeError, ValueError)):
        cache.crop(-3)
    got = forward(model, ids[:, 300:], cache)
    torch.testing.assert_close(got, forward(truth, ids, None)[:, 300:], **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_deepcopy_branches(mode: str) -> None:
    """A copied prompt cache (transformers' recipe for prefix sharing) goes its own way."""
    model, truth = pair("llama", mode)
    prompt, _ = tokens(200)
    stem = oscar_cache(model)
    forward(model, prompt, stem)
    for seed in (2, 3):
        ids = torch.cat((prompt, tokens(100, seed=seed)[0]), dim=1)
        branch = copy.deepcopy(stem)
        got = passes(model, ids[:, 200:], branch, [30, 1])
        torch.testing.assert_close(got, forward(truth, ids, None)[:, 200:], **CLOSE)
        check_blocks(branch, 2)
    assert stem.get_seq_length() == 200


@pytest.mark.parametrize("mode", MODES)
def test_layers_hold_what_a_dynamic_cache_holds(mode: str) -> None:
    """``layer.keys`` and ``layer.values``, packed blocks read back: at 16 bits the very numbers."""
    model, truth = pair("llama", mode)
    ids, mask = tokens(300, 130)
    cache, want = oscar_cache(model, mask=mask), dynamic_cache(truth)
    forward(model, ids, cache, mask)
    forward(truth, ids, want, mask)
    held = mask.bool()[:, None, :, None]
    for mine, other in zip(cache.layers, want.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys * held, **CLOSE)
        torch.testing.assert_close(mine.values, other.values * held, **CLOSE)
    check_blocks(cache, 2, 1)


@pytest.mark.parametrize("mode", [*MODES, "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision(dtype: torch.dtype, mode: str) -> None:
    """No further from the same weights in fp32 than a DynamicCache is.

    The two round differently, so that neither is the other's truth: both are off the fp32 logits by the rounding of
    the activations. A factor of 2 in the largest error, and of 1.3 in the RMS error, leaves room for chance only.
    """
    model, other = pair("llama", mode, dtype=dtype)
    truth = copy.deepcopy(other).float()
    ids, mask = tokens(270, 140)
    ids, mask = torch.cat((ids, tokens(20, 20, seed=2)[0]), dim=1), torch.cat((mask, mask.new_ones(2, 20)), dim=1)
    sizes = [250, 1]
    want = passes(truth, ids, dynamic_cache(truth), sizes, mask)[mask.bool()]
    dynamic = passes(other, ids, dynamic_cache(other), sizes, mask)[mask.bool()].float() - want
    cache = oscar_cache(model, mask=mask)
    oscar = passes(model, ids, cache, sizes, mask)[mask.bool()].float() - want
    assert oscar.isfinite().all()
    assert oscar.abs().max() < 2 * dynamic.abs().max()
    assert oscar.square().mean() < 1.3**2 * dynamic.square().mean()
    # and from each other by no more than both are off
    torch.testing.assert_close(oscar, dynamic, rtol=0, atol=float(oscar.abs().max() + dynamic.abs().max()))
    check_blocks(cache, 2, 1)


# --- fewer bits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_padded_batch_is_each_row_alone(config: OscarConfig, mode: str) -> None:
    model = make_model(attention=mode)
    ids, mask = tokens(250, 120, 110)  # each row fills a block at another step
    cache = oscar_cache(model, config, mask)
    got = generate(model, ids, cache, 30, mask)[:, 250:]
    check_blocks(cache, 2, 1, 1)
    for row, own, new in zip(ids, mask.bool(), got, strict=True):
        alone = row[own].unsqueeze(0)
        want = generate(model, alone, oscar_cache(model, config), 30)[0, alone.shape[1] :]
        assert torch.equal(new, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gemma3", "phi3"])
def test_padded_batch_is_each_row_alone_in_other_models(name: str, mode: str) -> None:
    model = make_model(name, attention=mode)
    ids, mask = tokens(250, 120)
    got = generate(model, ids, oscar_cache(model, OscarConfig(), mask), 30, mask)[:, 250:]
    for row, own, new in zip(ids, mask.bool(), got, strict=True):
        alone = row[own].unsqueeze(0)
        want = generate(model, alone, oscar_cache(model, OscarConfig()), 30)[0, alone.shape[1] :]
        assert torch.equal(new, want)


@pytest.mark.parametrize("sizes", [(380, 1), (100, 30), (250, 130, 1)], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_read_modes_agree(config: OscarConfig, sizes: tuple[int, ...]) -> None:
    """Packed bytes read as they are, and dequantized for torch's attention: the same logits.

    One layer: what it packs does not depend on how it is read, so no code can fall on the other side of a rounding.
    Without the queries, that is, which only attention "oscar" shows.
    """
    config = replace(config, equalize_queries=0.0)
    ids, mask = tokens(390, 310)
    got = []
    for mode in (*MODES, "eager"):
        model = make_model(attention=mode, num_hidden_layers=1)
        cache = oscar_cache(model, config, mask)
        got.append(passes(model, ids, cache, sizes, mask)[mask.bool()])
        check_blocks(cache, 3, 2)
    torch.testing.assert_close(got[0], got[1], **CLOSE)
    torch.testing.assert_close(got[0], got[2], **CLOSE)
    exact = passes(model, ids, oscar_cache(model, mask=mask), sizes, mask)[mask.bool()]
    assert (got[0] - exact).abs().max() > 100 * (got[0] - got[1]).abs().max()  # so the tolerance means something


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_read_modes_generate_alike(name: str) -> None:
    """Here too what is packed, by the first layer, does not depend on how it is read, if queries are not looked at."""
    layers = {} if name == "llama" else {"layer_types": ["full_attention", "sliding_attention"]}
    ids, mask = tokens(250, 100)
    got = []
    for mode in MODES:
        model = make_model(name, attention=mode, num_hidden_layers=len(layers.get("layer_types", "x")), **layers)
        got.append(generate(model, ids, oscar_cache(model, OscarConfig(equalize_queries=0.0), mask), 60, mask))
    assert torch.equal(*got)


@pytest.mark.parametrize("columns", [1, 40])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_next_pass_reads_the_dequantized_tokens(config: OscarConfig, mode: str, columns: int) -> None:
    """A pass gives what transformers gives over a DynamicCache that was filled with what the cache holds."""
    model, truth = pair("llama", mode)
    ids, mask = tokens(290, 150)
    new, own = tokens(columns, columns, seed=2)
    cache, filled = oscar_cache(model, config, mask), dynamic_cache(truth)
    forward(model, ids, cache, mask)
    check_blocks(cache, 2, 1)
    for index, layer in enumerate(cache.packed_layers):
        assert layer.keys is not None
        assert layer.values is not None
        filled.update(layer.keys, layer.values, index)
    mask = torch.cat((mask, own), dim=1)
    torch.testing.assert_close(forward(model, new, cache, mask), forward(truth, new, filled, mask), **CLOSE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_pass_reads_its_own_tokens_exactly(config: OscarConfig, mode: str) -> None:
    """The prompt's logits do not suffer from the quantization: it is read before it is packed."""
    model, truth = pair("llama", mode)
    ids, mask = tokens(300, 260)
    got = forward(model, ids, oscar_cache(model, config, mask), mask)
    torch.testing.assert_close(got[mask.bool()], forward(truth, ids, None, mask)[mask.bool()], **CLOSE)


def first_layer(cache: OscarCache, row: int) -> dict[str, Tensor]:
    """What the first layer holds of a row, unused room left out."""
    state = cache.packed_layers[0].state
    assert state is not None
    used = {"records": state.num_blocks[row], "norms": state.num_blocks[row]}
    used |= {"tail_keys": state.tail_lengths[row], "tail_values": state.tail_lengths[row]}
    out = {}
    for name, x in state.tensors().items():
        out[name] = x[row, :, : used[name]] if name.startswith("tail") else x[row, : used.get(name)]
    return out


def feedings() -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Name, lengths of the rows (the first is compared), sizes of the passes."""
    yield "chunks", (300,), (100,)
    yield "steps", (300,), (1,)
    yield "ragged", (300,), (3, 130, 128, 5)
    yield "batch", (300, 300), (300,)
    yield "longest", (300, 5, 150), (300,)
    yield "padded", (300, 390, 150), (390,)
    yield "padded chunks", (300, 390), (100,)
    yield "padded steps", (300, 310), (1,)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_codes_do_not_depend_on_how_tokens_came(config: OscarConfig, mode: str) -> None:
    """The bytes of the first layer are the same bit for bit: in one pass, in chunks, in steps, in a padded batch."""
    model = exact_first_layer(make_model(attention=mode))
    prompt, _ = tokens(300)
    cache = oscar_cache(model, config)
    forward(model, prompt, cache)
    check_blocks(cache, 2)
    want = first_layer(cache, 0)
    assert len(want["records"].unique()) > 100  # no blank bytes
    for name, lengths, sizes in feedings():
        if "steps" in name and config != OscarConfig():
            continue  # the slow ones for one
        ids, mask = tokens(*lengths, seed=2)
        ids[0, -300:] = prompt
        cache = oscar_cache(model, config, mask)
        passes(model, ids, cache, sizes, mask)
        got = first_layer(cache, 0)
        assert got.keys() == want.keys()
        torch.testing.assert_close(got.pop("query_power", None), want.get("query_power"), rtol=1e-13, atol=0.0)
        for part, x in got.items():
            assert torch.equal(x, want[part]), f"{name}: {part}"


@pytest.mark.parametrize("mode", MODES)
def test_codes_do_not_depend_on_generate(mode: str) -> None:
    """The same, through ``generate``: the prompt chunked or not, the rows beams or not."""
    model = exact_first_layer(make_model(attention=mode))
    ids, mask = tokens(240)
    sequence = generate(model, ids, oscar_cache(model, OscarConfig()), 40)
    want = oscar_cache(model, OscarConfig())
    forward(model, sequence[:, :-1], want)
    for options in ({}, {"prefill_chunk_size": 50}, {"num_return_sequences": 2, "do_sample": True, "top_k": 1}):
        cache = oscar_cache(model, OscarConfig(), mask)
        rows = generate(model, ids, cache, 40, **options)
        for row in range(rows.shape[0]):
            if torch.equal(rows[row], sequence[0]):  # chunks are read packed by the next ones: other tokens may come
                for part, x in first_layer(want, 0).items():
                    assert torch.equal(first_layer(cache, row)[part], x), f"{options}: {part}"
            else:
                assert "prefill_chunk_size" in options
                own = oscar_cache(model, OscarConfig())
                forward(model, rows[row : row + 1, :-1], own)
                assert torch.equal(first_layer(cache, row)["records"], first_layer(own, 0)["records"])


@remember
def errors(config: OscarConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits after the first pass, and their error to 16 bits; relative RMS error of keys and values."""
    model = make_model(attention="oscar")
    ids, _ = tokens(400)
    cache, exact = oscar_cache(model, config), dynamic_cache(make_model())
    logits = passes(model, ids, cache, [360, 1])[:, 360:]
    truth = forward(make_model(), ids, exact)[:, 360:]
    relative = {}
    for name in ("keys", "values"):
        got, want = (getattr(x.layers[0], name)[:, :, :384] for x in (cache, exact))
        relative[name] = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    return (logits - truth).square().mean().sqrt() / truth.square().mean().sqrt(), relative


def test_eight_bits_are_close() -> None:
    """A uniform 8-bit grid over a group's range R errs by R / 255 / sqrt(12) RMS, and R is below 8 RMS: under 1 %.

    The logits see an average of many such errors through two layers, which here at most doubles it.
    """
    logits, relative = errors(EIGHT_BIT)
    assert all(0 < x < 0.01 for x in relative.values())
    assert 0 < logits < 0.02


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_few_bits_really_quantize(config: OscarConfig) -> None:
    """Worse than 8 bits, and better than nothing: 2 bits of a Gaussian lose at least 12 % of its power (0.34 RMS).

    That is the optimal quantizer's loss without groups (Max, 1960); ranges per group of 32 do about as well.
    """
    logits, relative = errors(config)
    eight, _ = errors(EIGHT_BIT)
    assert logits > 3 * eight
    bits = {"keys": config.key_bits, "values": config.value_bits}
    for name, error in relative.items():
        low, high = {2: (0.2, 0.55), 3: (0.08, 0.35), 4: (0.03, 0.2)}[bits[name]]
        assert low < error < high, (name, error)


def test_tail_and_sinks_are_exact() -> None:
    """The first 4 and the newest tokens are the very numbers that the model gave."""
    model = make_model(attention="oscar", num_hidden_layers=1)
    ids, _ = tokens(300)
    cache, exact = oscar_cache(model, OscarConfig()), dynamic_cache(make_model(num_hidden_layers=1))
    forward(model, ids, cache)
    forward(make_model(num_hidden_layers=1), ids, exact)
    for name in ("keys", "values"):
        got, want = getattr(cache.layers[0], name), getattr(exact.layers[0], name)
        assert torch.equal(got[:, :, :4], want[:, :, :4])
        assert torch.equal(got[:, :, 256:], want[:, :, 256:])
        assert not torch.isclose(got[:, :, 4:256], want[:, :, 4:256], rtol=1e-3).all(-1).any()


@pytest.mark.parametrize("prefix", [350, 256], ids=["tail", "boundary"])
@pytest.mark.parametrize(
    ("config", "mode"),
    [*((config, "oscar") for config in CONFIGS.values()), (OscarConfig(), "sdpa"), (PLAIN, "sdpa")],
    ids=[*CONFIGS, "default-sdpa", "plain-sdpa"],
)
def test_second_question_on_a_shared_prefix(config: OscarConfig, mode: str, prefix: int) -> None:
    """Ask, crop back to the prefix, ask something else: the answer of a fresh cache."""
    model = make_model(attention=mode)
    context, _ = tokens(prefix)
    first, second = (torch.cat((context, tokens(20, seed=seed)[0]), dim=1) for seed in (2, 3))
    fresh = oscar_cache(model, config)
    forward(model, context, fresh)
    want = generate(model, second, fresh, 30)
    cache = oscar_cache(model, config)
    forward(model, context, cache)
    answer = generate(model, first, cache, 12)
    assert not torch.equal(answer[:, prefix + 20 :], want[:, prefix + 20 : prefix + 32])
    if prefix == 256:  # another block is packed, and dropped again
        forward(model, tokens(110, seed=4)[0], cache)
        check_blocks(cache, 3)
    cache.crop(prefix - cache.get_seq_length())
    assert cache.get_seq_length() == prefix
    check_blocks(cache, 2)
    assert torch.equal(generate(model, second, cache, 30), want)
    check_blocks(cache, 3 if prefix == 350 else 2)


# --- memory


def reachable(x: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object holds, however deep, once."""
    if id(x) in seen:
        return
    seen.add(id(x))
    parts: Iterable[Any] = ()
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        parts = x.values()
    elif isinstance(x, list | tuple):
        parts = x
    elif type(x).__module__.startswith(("oscar_kv", "transformers.cache_utils")):
        parts = vars(x).values()
    for part in parts:
        yield from reachable(part, seen)


def held_bytes(cache: OscarCache) -> int:
    return sum(x.nbytes for x in reachable(cache, set()))


@pytest.mark.parametrize("rows", [(300,), (300, 5, 150)], ids=["one", "padded"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("config", [EXACT, OscarConfig(), PLAIN], ids=["exact", "default", "plain"])
def test_memory_is_every_tensor_held(name: str, mode: str, rows: tuple[int, ...], config: OscarConfig) -> None:
    model = make_model(name, attention=mode)
    ids, mask = tokens(*rows)
    cache = oscar_cache(model, config, mask)
    assert cache.memory_bytes()["total"] == held_bytes(cache)
    forward(model, ids, cache, mask)
    memory = cache.memory_bytes()
    assert memory["total"] == sum(size for part, size in memory.items() if part != "total") == held_bytes(cache)
    for turn in range(3):
        new, own = tokens(*[50] * len(rows), seed=turn)
        mask = torch.cat((mask, own), dim=1)
        forward(model, new, cache, mask)
        assert cache.memory_bytes()["total"] == held_bytes(cache)
    cache.reorder_cache(torch.arange(len(rows)))
    assert cache.memory_bytes()["total"] == held_bytes(cache)


def test_memory_and_bits_by_hand() -> None:
    """1024 tokens of 2 KV heads and 32 channels in 2 layers, in float32."""
    model = make_model(attention="oscar")
    ids, _ = tokens(1024)
    cache, dynamic = oscar_cache(model, OscarConfig()), dynamic_cache(model)
    forward(model, ids, cache)
    forward(make_model(), ids, dynamic)
    layers, heads, dim, blocks = 2, 2, 32, 8
    elements = 128 * dim
    codes = 2 * elements * 2 // 8  # keys and values
    scales = 2 * (128 // 32 * dim) + 2 * (128 * dim // 32) + 16  # fp8 scale and center; groups of 32; units
    want = {
        "codes": layers * heads * blocks * codes,
        "scales_zeros": layers * heads * blocks * scales,
        "norms": layers * blocks * 128 * 2,  # bf16, one for all heads
        "tail": 0,  # 1024 tokens are 8 blocks
        "sinks": layers * heads * 2 * 4 * dim * 4,
        "equalizer": layers * heads * dim * (4 + 8),  # the vector, and the power of queries
        "reserved": 0,
        "index": 0,
        "other_layers": 0,
    }
    total = sum(want.values())
    assert cache.memory_bytes() == {**want, "total": total}
    assert cache.bits_per_element() == pytest.approx(8 * total / (2 * layers * heads * 1024 * dim))
    held = sum(x.nbytes for layer in dynamic.layers for x in (layer.keys, layer.values))
    assert held == 2 * layers * heads * 1024 * dim * 4
    assert total < 0.1 * held  # 0.08 of float32, and the sinks


def test_bits_per_element_counts_real_tokens() -> None:
    """Padding is not an element, and layers that are not packed count on neither side."""
    model = make_model("gemma3", attention="oscar")
    ids, mask = tokens(300, 140)
    cache = oscar_cache(model, OscarConfig())
    with pytest.raises(ValueError, match="empty"):
        cache.bits_per_element()
    forward(model, ids, cache, mask)
    memory = cache.memory_bytes()
    assert memory["other_layers"] > 0
    elements = (300 + 140) * 2 * 2 * 2 * 32  # tokens, keys and values, layers, heads, channels
    assert cache.bits_per_element() == pytest.approx(8 * (memory["total"] - memory["other_layers"]) / elements)


@pytest.mark.parametrize("lengths", [(370,), (370, 230)], ids=["one", "padded"])
@pytest.mark.parametrize("config", [EXACT, OscarConfig()], ids=["exact", "default"])
@pytest.mark.parametrize("mode", MODES)
def test_max_length_allocates_once(mode: str, config: OscarConfig, lengths: tuple[int, ...]) -> None:
    model = make_model(attention=mode)
    ids, mask = tokens(*lengths)
    want = generate(model, ids, oscar_cache(model, config, mask), 31, mask)
    cache = oscar_cache(model, config, mask, max_length=400)
    assert cache.get_max_length() == 400
    forward(model, ids[:, :1], cache, mask[:, :1])

    def places() -> list[dict[str, int]]:
        states = [layer.state for layer in cache.packed_layers]
        return [{name: x.data_ptr() for name, x in state.tensors().items()} for state in states if state is not None]

    before, size = places(), cache.memory_bytes()["total"] - cache.memory_bytes()["index"]
    cache.crop(-1)
    assert torch.equal(generate(model, ids, cache, 31, mask), want)
    assert cache.get_seq_length() == 400
    assert places() == before
    assert cache.memory_bytes()["total"] - cache.memory_bytes()["index"] == size
    check_blocks(cache, *[(n + 30) // 128 for n in lengths])


@pytest.mark.parametrize("mode", MODES)
def test_max_length_of_a_padded_batch_counts_every_byte(mode: str) -> None:
    """The index of the padding is part of what is allocated at once."""
    model = make_model(attention=mode)
    ids, mask = tokens(200, 90)
    cache = oscar_cache(model, OscarConfig(), mask, max_length=400)
    forward(model, ids, cache, mask)
    size = held_bytes(cache)
    new, own = tokens(200, 200, seed=2)
    passes(model, new, cache, [1, 1, 97, 1, 96, 1], torch.cat((mask, own), dim=1))
    assert held_bytes(cache) <= size


@pytest.mark.parametrize("mode", MODES)
def test_more_than_max_length_changes_nothing(mode: str) -> None:
    model, truth = pair("llama", mode)
    ids, _ = tokens(330)
    cache = oscar_cache(model, max_length=300)
    with pytest.raises(ValueError, match="max_length 300"):
        forward(model, ids, cache)
    assert cache.get_seq_length() == 0
    passes(model, ids[:, :290], cache, [270, 20])
    memory = cache.memory_bytes()
    with pytest.raises(ValueError, match="max_length 300"):
        forward(model, ids[:, 290:301], cache)
    assert cache.get_seq_length() == 290
    assert cache.memory_bytes() == memory
    got = forward(model, ids[:, 290:300], cache)
    torch.testing.assert_close(got, forward(truth, ids[:, :300], None)[:, 290:], **CLOSE)
    with pytest.raises(ValueError, match="max_length 300"):
        forward(model, ids[:, 300:301], cache)


# --- storing


def stored(cache: OscarCache) -> dict[str, Any]:
    """Through a file, as anyone would read it."""
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@pytest.mark.parametrize("lengths", [(240,), (240, 5, 110)], ids=["one", "padded"])
@pytest.mark.parametrize(
    ("config", "mode"),
    [*((config, "oscar") for config in [EXACT, *CONFIGS.values()]), (EXACT, "sdpa"), (OscarConfig(), "sdpa")],
    ids=["exact", *CONFIGS, "exact-sdpa", "default-sdpa"],
)
def test_stored_cache_goes_on(config: OscarConfig, mode: str, lengths: tuple[int, ...]) -> None:
    model = make_model(attention=mode)
    ids, mask = tokens(*lengths)
    cache = oscar_cache(model, config, mask)
    first = generate(model, ids, cache, 12, mask)
    fresh = oscar_cache(model, config, mask)
    forward(model, ids[:, :7], fresh, mask[:, :7])  # what it held is forgotten
    fresh.load_state_dict(stored(cache))
    assert fresh.get_seq_length() == cache.get_seq_length()
    seen = torch.cat((mask, mask.new_ones(len(lengths), 12)), dim=1)
    want = generate(model, first, cache, 20, seen)
    assert torch.equal(generate(model, first, fresh, 20, seen), want)
    check_blocks(fresh, *[(n + 31) // 128 for n in lengths])
    for mine, other in zip(fresh.packed_layers, cache.packed_layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


@pytest.mark.parametrize("mode", MODES)
def test_stored_cache_fits_a_preallocated_one(mode: str) -> None:
    model = make_model(attention=mode)
    ids, _ = tokens(230)
    cache = oscar_cache(model, OscarConfig())
    first = generate(model, ids, cache, 40)
    fresh = oscar_cache(model, OscarConfig(), max_length=400)
    fresh.load_state_dict(stored(cache))
    want = generate(model, first, cache, 40)
    assert torch.equal(generate(model, first, fresh, 40), want)
    with pytest.raises(ValueError, match="max_length 400"):
        forward(model, ids, fresh)


@pytest.mark.parametrize("mode", MODES)
def test_state_dict_is_of_its_moment(mode: str) -> None:
    """Without a file in between: generating on does not change what was taken before."""
    model = make_model(attention=mode)
    ids, mask = tokens(235, 105)
    cache = oscar_cache(model, OscarConfig(), mask)
    first = generate(model, ids, cache, 15, mask)
    state = cache.state_dict()
    seen = torch.cat((mask, mask.new_ones(2, 15)), dim=1)
    want = generate(model, first, cache, 35, seen)
    fresh = oscar_cache(model, OscarConfig(), mask)
    fresh.load_state_dict(state)
    assert torch.equal(generate(model, first, fresh, 35, seen), want)


def test_stored_cache_while_recording() -> None:
    """Tokens that may be taken back are stored too."""
    model = make_model(attention="oscar")
    ids, _ = tokens(390)
    cache = oscar_cache(model, OscarConfig())
    cache.activate_past_recording()
    forward(model, ids[:, :300], cache)
    fresh = oscar_cache(model, OscarConfig())
    fresh.load_state_dict(stored(cache))
    fresh.activate_past_recording()
    for other in (cache, fresh):
        other.crop(-100)
    got = [passes(model, ids[:, 200:], other, [1, 1, 60, 10]) for other in (cache, fresh)]
    assert torch.equal(*got)


def test_stored_cache_of_something_else() -> None:
    model = make_model(attention="oscar")
    cache = oscar_cache(model, OscarConfig())
    ids, _ = tokens(300)
    forward(model, ids, cache)
    state = stored(cache)
    other = make_model(attention="oscar", num_hidden_layers=3)
    mixed = make_model(
        "gemma3", attention="oscar", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    for target, changed, match in (
        (oscar_cache(model, CONFIGS["quality"]), {}, "config"),
        (oscar_cache(model, OscarConfig()), {"format": 1}, "format"),
        (oscar_cache(other, OscarConfig()), {}, "num_layers"),
        (oscar_cache(mixed, OscarConfig()), {}, "layer_kinds"),
    ):
        with pytest.raises(ValueError, match=match):
            target.load_state_dict({**state, **changed})
    held = first_layer(cache, 0)
    with pytest.raises(ValueError, match="format"):
        cache.load_state_dict({**state, "format": None})
    assert cache.get_seq_length() == 300  # refused before anything is forgotten
    assert torch.equal(first_layer(cache, 0)["records"], held["records"])


def test_vocabulary() -> None:
    """Prompts avoid the padding token, so that no test depends on how a row's padding is recognized."""
    ids, mask = tokens(300, 5)
    assert ids[mask.bool()].min() > 0
    assert ids.max() < VOCAB
