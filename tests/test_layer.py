"""One layer's state: what is packed when, and that its bytes depend on nothing but a row's own tokens."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_kv import blocks as blocks_module
from oscar_kv.attention import attend
from oscar_kv.codec import PackedBlocks, decode, encode
from oscar_kv.config import OscarConfig
from oscar_kv.layer import LayerState
from oscar_kv.prefix import layer_from, state_of
from oscar_kv.recent import Recent
from oscar_kv.scale import channel_equalizer
from oscar_kv.timeline import Timeline

HEADS, KEY_DIM, VALUE_DIM = 2, 32, 16
LENGTHS = [0, 1, 31, 32, 127, 128, 129, 255, 256, 257, 384, 400]
DEFAULT = OscarConfig()
VARIANTS = {
    "quality": OscarConfig.quality(),
    "per_head": OscarConfig(scale_scope="head", token_norm="max", num_sinks=0),
    "plain": OscarConfig(token_norm=None, equalize=0.0, key_fit="lstsq", value_bits=8),
    "keys_16": OscarConfig(key_bits=16),
    "values_16": OscarConfig(value_bits=16),
    "residual_256": OscarConfig(residual_length=256),
    "many_sinks": OscarConfig(num_sinks=40, key_group=128),
}


def _tokens(batch: int, length: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, HEADS, length, KEY_DIM, generator=generator)
    values = torch.randn(batch, HEADS, length, VALUE_DIM, generator=generator)
    return keys.to(dtype), values.to(dtype)


def _queries(keys: Tensor) -> Tensor:
    """Two query heads per KV head, whose channels have unequal sizes; a token's depend on its keys alone."""
    sizes = torch.linspace(0.1, 3.0, keys.shape[-1], dtype=keys.dtype)
    return torch.stack((keys.flip(-1) * sizes, keys.roll(1, -1)), dim=2).flatten(1, 2)


class Run:
    """A cache of one layer, fed as OscarCache feeds its layers, and the tokens that each of its rows should hold."""

    def __init__(
        self,
        batch: int = 1,
        config: OscarConfig = DEFAULT,
        *,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        keys, values = _tokens(batch, 1, dtype=dtype)
        self.timeline = Timeline()
        self.layer = LayerState(config, self.timeline, keys, values, max_length)
        self.config = config
        self.keys = [keys[b, :, :0] for b in range(batch)]
        self.values = [values[b, :, :0] for b in range(batch)]
        self.columns: list[list[int]] = [[] for _ in range(batch)]

    def feed(
        self, keys: Tensor, values: Tensor, size: int | None = None, valid: Tensor | None = None, check: bool = False
    ) -> Run:
        """Passes of ``size`` columns; ``check`` compares what each pass reads with what it should read."""
        length = keys.shape[2]
        size = size or max(1, length)
        for start in range(0, length, size):
            stop = min(start + size, length)
            part = None if valid is None else valid[:, start:stop]
            first = self.layer.columns
            for b in range(len(self.keys)):
                own = torch.ones(stop - start, dtype=torch.bool) if part is None else part[b]
                self.keys[b] = torch.cat((self.keys[b], keys[b, :, start:stop][:, own]), dim=1)
                self.values[b] = torch.cat((self.values[b], values[b, :, start:stop][:, own]), dim=1)
                self.columns[b] += (first + own.nonzero().flatten()).tolist()
            recent = self.layer.append(keys[:, :, start:stop], values[:, :, start:stop], part)
            if check:
                self.check_dense(self.layer.dense(recent), first + stop - start)
            self.layer.commit(recent, _queries(keys[:, :, start:stop]))
        return self

    def crop(self, columns: int) -> None:
        self.layer.check_crop(columns)
        self.layer.crop(columns)
        self.timeline.crop(columns)
        for b, own in enumerate(self.columns):
            self.columns[b] = [c for c in own if c < self.layer.columns]
            self.keys[b] = self.keys[b][:, : len(self.columns[b])]
            self.values[b] = self.values[b][:, : len(self.columns[b])]

    def select(self, rows: list[int]) -> None:
        index = torch.tensor(rows)
        self.layer.select(index)
        self.timeline.select(index)
        self.keys, self.values = [self.keys[b] for b in rows], [self.values[b] for b in rows]
        self.columns = [list(self.columns[b]) for b in rows]

    # ---- the truth

    def packed(self, b: int, blocks: int) -> tuple[PackedBlocks, Tensor | None]:
        """Row b's first blocks, encoded at once and by themselves, and its equalization vector."""
        keys, values = self.keys[b][None, :, : 128 * blocks], self.values[b][None, :, : 128 * blocks]
        config, equalizer, sinks = self.config, None, self.config.num_sinks
        if config.equalize and config.key_bits != 16:
            first = keys[:, :, :128]
            power = _queries(first)[:, :, sinks:].double().square().sum(2).unflatten(1, (HEADS, 2)).sum(2)
            equalizer = channel_equalizer(
                first.float(), config.equalize, config.key_group, sinks, power, config.equalize_queries
            )
        return encode(keys, values, self.config, equalizer=equalizer, num_sinks=sinks), equalizer

    def check_rows(self, hold: int = 0) -> None:
        """Every row holds exactly the blocks that its tokens fill, with the right bytes, and the others as they are.

        ``hold``: at most this many of the newest tokens may not be packed yet (the caller may roll them back).
        """
        layer, config = self.layer, self.config
        for b in range(len(self.keys)):
            length = self.keys[b].shape[1]
            blocks = layer.num_blocks[b]
            full = max(0, length - config.residual_length + 128) // 128
            assert max(0, length - config.residual_length + 128 - hold) // 128 <= blocks <= full
            assert layer.tail_lengths[b] == length - 128 * blocks
            assert torch.equal(layer.tail_keys[b, :, : layer.tail_lengths[b]], self.keys[b][:, 128 * blocks :])
            assert torch.equal(layer.tail_values[b, :, : layer.tail_lengths[b]], self.values[b][:, 128 * blocks :])
            assert (self.timeline.lengths or [0] * len(self.keys))[b] == length
            if not blocks:
                continue
            truth, equalizer = self.packed(b, blocks)
            assert torch.equal(layer.records[b, :blocks], truth.records[0])
            if truth.norms is None:
                assert layer.norms is None
            else:
                assert layer.norms is not None
                assert torch.equal(layer.norms[b, :blocks], truth.norms[0])
            if equalizer is None:
                assert layer.equalizer is None
            else:
                assert layer.equalizer is not None
                assert torch.equal(layer.equalizer[b], equalizer[0])
            assert torch.equal(layer.sink_keys[b], self.keys[b][:, : config.num_sinks])
            assert torch.equal(layer.sink_values[b], self.values[b][:, : config.num_sinks])

    def check_dense(self, dense: tuple[Tensor, Tensor], columns: int) -> None:
        """Packed tokens as they decode, sinks and all others as they are, each in its column; padding is 0."""
        for b in range(len(self.keys)):
            truth = [self.keys[b].clone(), self.values[b].clone()]
            blocks = self.layer.num_blocks[b]
            if blocks:
                packed, equalizer = self.packed(b, blocks)
                for own, decoded in zip(truth, decode(packed, self.layer.layout, equalizer=equalizer), strict=True):
                    own[:, self.config.num_sinks : 128 * blocks] = decoded[0, :, self.config.num_sinks :]
            for own, given in zip(truth, dense, strict=True):
                placed = own.new_zeros(HEADS, columns, own.shape[-1])
                placed[:, self.columns[b]] = own
                assert torch.equal(given[b], placed)

    def dense(self) -> tuple[Tensor, Tensor]:
        layer = self.layer
        used = max(layer.tail_lengths)
        tail = Recent(layer.tail_keys[:, :, :used], layer.tail_values[:, :, :used], layer.tail_lengths, 0)
        return layer.dense(tail)


def _snapshot(run: Run) -> dict[str, Any]:
    """Everything that a refused call must leave as it was."""
    layer, timeline = run.layer, run.timeline
    tensors = {name: x.clone() for name, x in layer.tensors().items()}
    if timeline.column_of_slot is not None:
        tensors["column_of_slot"] = timeline.column_of_slot.clone()
    counts = (layer.num_blocks, layer.tail_lengths, layer.columns, layer.recording, timeline.columns, timeline.lengths)
    return {"tensors": tensors, "counts": copy.deepcopy(counts)}


def _unchanged(run: Run, before: dict[str, Any]) -> bool:
    now = _snapshot(run)
    same = now["tensors"].keys() == before["tensors"].keys()
    same = same and all(torch.equal(_bits(x), _bits(before["tensors"][name])) for name, x in now["tensors"].items())
    return same and now["counts"] == before["counts"]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.is_floating_point() else x


def _left_padded(lengths: list[int], columns: int) -> Tensor:
    return torch.arange(columns) >= columns - torch.tensor(lengths).unsqueeze(1)


def _holes(lengths: list[int], columns: int, seed: int = 0) -> Tensor:
    """Exactly this many tokens in each row, anywhere."""
    order = torch.rand(len(lengths), columns, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order.argsort(-1) < torch.tensor(lengths).unsqueeze(1)


# ---- bytes


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [None, 1, 7, 100, 128, 129, 300])
def test_bytes_do_not_depend_on_the_passes(length: int, size: int | None) -> None:
    run = Run(batch=2).feed(*_tokens(2, length), size)
    run.check_rows()
    assert run.layer.columns == run.timeline.columns == length


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [None, 1, 100, 129])
def test_bytes_of_other_configurations(variant: str, size: int | None) -> None:
    for length in (128, 257, 400):
        Run(1, VARIANTS[variant]).feed(*_tokens(1, length), size).check_rows()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_of_16_bit_models(dtype: torch.dtype) -> None:
    for config in (DEFAULT, VARIANTS["keys_16"], VARIANTS["values_16"]):
        run = Run(2, config, dtype=dtype).feed(*_tokens(2, 300, dtype=dtype), 70, check=True)
        run.check_rows()


@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("size", [None, 1, 7, 100, 128, 129, 300])
def test_bytes_do_not_depend_on_the_batch(padding: str, size: int | None) -> None:
    """All lengths side by side, one row without any token among them."""
    columns = 430
    valid = (_left_padded if padding == "left" else _holes)(LENGTHS, columns)
    run = Run(len(LENGTHS)).feed(*_tokens(len(LENGTHS), columns), size, valid)
    assert run.timeline.lengths == LENGTHS
    run.check_rows()


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_of_other_configurations_in_a_batch(variant: str) -> None:
    lengths = [0, 5, 128, 270, 390]
    run = Run(5, VARIANTS[variant]).feed(*_tokens(5, 400), 90, _holes(lengths, 400), check=True)
    run.check_rows()


def test_left_padded_prompt_and_generated_tokens() -> None:
    """A padded prefill, then columns that are tokens in every row, as generate() goes."""
    lengths = [3, 120, 200, 256]
    run = Run(4).feed(*_tokens(4, 256), None, _left_padded(lengths, 256))
    run.check_rows()
    for step in range(140):
        keys, values = _tokens(4, 1, seed=100 + step)
        run.feed(keys, values, None, torch.ones(4, 1, dtype=torch.bool) if step % 2 else None)
    assert run.timeline.lengths == [n + 140 for n in lengths]
    run.check_rows()


def test_pass_without_any_token() -> None:
    """The first part of a left-padded prompt that is read in parts; and a padded column later on."""
    run = Run(2)
    query = torch.randn(2, 4, 5, KEY_DIM)
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    recent = run.layer.append(*_tokens(2, 5), nothing)
    out = attend(query, run.layer.view(recent), scaling=0.2, mask=torch.zeros(2, 1, 5, 5, dtype=torch.bool))
    assert (out == 0).all()
    assert all((x == 0).all() and x.shape[2] == 5 for x in run.layer.dense(recent))
    run.layer.commit(recent)
    run.feed(*_tokens(2, 300, seed=1), 100, check=True)
    run.feed(*_tokens(2, 5, seed=2), None, nothing, check=True)
    run.feed(*_tokens(2, 100, seed=3), 33, check=True)
    assert run.timeline.lengths == [400, 400]
    assert run.layer.columns == 410
    run.check_rows()


@pytest.mark.parametrize("encode_blocks", [1, 3])
def test_long_prefill_is_encoded_in_parts(monkeypatch: pytest.MonkeyPatch, encode_blocks: int) -> None:
    monkeypatch.setattr(blocks_module, "_ENCODE_BLOCKS", encode_blocks)
    Run(2).feed(*_tokens(2, 1000)).check_rows()
    Run(3).feed(*_tokens(3, 1000), 700, _holes([300, 0, 900], 1000)).check_rows()


def test_prefill_beyond_one_part_as_shipped() -> None:
    length = 128 * blocks_module._ENCODE_BLOCKS + 300
    Run(1).feed(*_tokens(1, length)).check_rows()


@pytest.mark.parametrize("size", [1, 50, 128, 300, 700])
@pytest.mark.parametrize("recording", [False, True])
def test_each_token_is_packed_exactly_once(monkeypatch: pytest.MonkeyPatch, size: int, recording: bool) -> None:
    columns, batch = 700, 4
    keys, values = _tokens(batch, columns)
    values[..., 0] = torch.arange(columns) + 1000.0 * torch.arange(batch).view(batch, 1, 1)
    packed: Counter[float] = Counter()

    def spy(k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> PackedBlocks:
        packed.update(v[:, 0, :, 0].flatten().tolist())
        return encode(k, v, *args, **kwargs)

    monkeypatch.setattr(blocks_module, "encode", spy)
    run = Run(batch)
    run.layer.recording = recording
    run.feed(keys, values, size, _holes([0, 127, 400, 700], columns))
    expected = [
        number
        for b in range(batch)
        for number in run.values[b][0, : 128 * run.layer.num_blocks[b], 0].tolist()
    ]  # fmt: skip
    assert packed == Counter(expected)
    run.check_rows(hold=128 if recording else 0)


# ---- what a pass reads


@pytest.mark.parametrize("size", [None, 1, 7, 100, 129])
@pytest.mark.parametrize("length", [1, 128, 257, 400])
def test_dense_is_decoded_blocks_and_the_tail_as_it_is(length: int, size: int | None) -> None:
    run = Run(2).feed(*_tokens(2, length), size, check=size != 1)
    run.check_dense(run.dense(), length)


@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("size", [None, 30, 129])
def test_dense_of_padded_rows(padding: str, size: int | None) -> None:
    valid = (_left_padded if padding == "left" else _holes)(LENGTHS, 430)
    run = Run(len(LENGTHS)).feed(*_tokens(len(LENGTHS), 430), size, valid, check=True)
    run.check_dense(run.dense(), 430)


@pytest.mark.parametrize("padding", [None, "left", "holes"])
def test_view_gives_the_attention_of_dense(padding: str | None) -> None:
    """Softmax in fp64 over dense(), column by column, against attend() over the packed view."""
    lengths, columns = [0, 40, 128, 300], 330
    valid = torch.ones(4, columns, dtype=torch.bool)
    if padding is not None:
        valid = (_left_padded if padding == "left" else _holes)(lengths, columns)
    keys, values = _tokens(4, columns)
    run = Run(4)
    for start in range(0, columns, 55):
        stop = min(start + 55, columns)
        part = None if padding is None else valid[:, start:stop]
        recent = run.layer.append(keys[:, :, start:stop], values[:, :, start:stop], part)
        allowed = (torch.arange(stop) <= torch.arange(start, stop).unsqueeze(1)) & valid[:, None, None, :stop]
        query = torch.randn(4, 4, stop - start, KEY_DIM, generator=torch.Generator().manual_seed(start))
        view = run.layer.view(recent)
        assert view.padded_queries == (not bool(valid[:, start:stop].all()))
        out = attend(query, view, scaling=0.2, mask=None if padding is None else allowed)
        k, v = (x.double().repeat_interleave(2, 1) for x in run.layer.dense(recent))
        scores = (query.double() @ k.transpose(-1, -2) * 0.2).masked_fill(~allowed, -torch.inf)
        truth = torch.softmax(scores, -1).nan_to_num(0.0) @ v
        sees = allowed.any(-1).expand(4, 4, stop - start)  # what a padding query gets is never read
        # fp32 sums of a few hundred numbers of size 1
        torch.testing.assert_close(out.double()[sees], truth[sees], rtol=0, atol=2e-5)
        run.layer.commit(recent)


# ---- taking tokens back


@pytest.mark.parametrize("size", [None, 50])
@pytest.mark.parametrize("columns", [1, 20, 44, 172, 300])
def test_crop_and_go_on(size: int | None, columns: int) -> None:
    """Inside the tail (300 = 2 blocks and 44), to the block boundaries 256 and 128, and to nothing."""
    run = Run(2).feed(*_tokens(2, 300), size)
    run.crop(columns)
    assert run.layer.columns == run.timeline.columns == 300 - columns
    run.check_rows()
    if columns < 300:
        run.check_dense(run.dense(), 300 - columns)
    run.feed(*_tokens(2, 290, seed=5), size, check=True)
    run.check_rows()
    assert run.timeline.lengths == [590 - columns] * 2


@pytest.mark.parametrize("columns", [45, 100, 171, 173, 299])
def test_crop_into_a_block_is_refused_and_changes_nothing(columns: int) -> None:
    run = Run(2).feed(*_tokens(2, 300))
    before = _snapshot(run)
    with pytest.raises(ValueError, match=f"cannot remove {columns}"):
        run.crop(columns)
    assert _unchanged(run, before)
    run.feed(*_tokens(2, 100, seed=5))
    run.check_rows()


@pytest.mark.parametrize("padding", ["left", "holes"])
def test_crop_of_padded_rows(padding: str) -> None:
    lengths, columns = [0, 10, 128 + 60, 256 + 70], 400
    valid = (_left_padded if padding == "left" else _holes)(lengths, columns)
    run = Run(4).feed(*_tokens(4, columns), 130, valid)
    run.crop(50)  # at most 50 tokens of a row
    assert run.timeline.lengths == [int(x[:350].sum()) for x in valid]
    run.check_rows()
    run.check_dense(run.dense(), 350)
    run.feed(*_tokens(4, 200, seed=5), 60, _holes([200, 10, 150, 90], 200, seed=3), check=True)
    run.check_rows()


def test_crop_is_refused_for_all_rows_if_one_cannot() -> None:
    lengths = [10, 128 + 20, 128 + 100]
    run = Run(3).feed(*_tokens(3, 300), None, _left_padded(lengths, 300))
    before = _snapshot(run)
    with pytest.raises(ValueError, match="row 1"):
        run.crop(30)
    assert _unchanged(run, before)
    run.crop(20)
    run.check_rows()


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("size", [1, 5, 60, 128, 129, 300])
@pytest.mark.parametrize("config", [DEFAULT, VARIANTS["residual_256"]], ids=["128", "256"])
def test_recording_can_take_back_the_newest_pass(size: int, padding: bool, config: OscarConfig) -> None:
    """All of it, and of a pass of more than 128 columns the last 128, wherever blocks fill up."""
    run = Run(2, config)
    run.layer.recording = True
    valid = _holes([420, 590], 600)
    keys, values = _tokens(2, 600)
    for start in range(0, 600, size):
        part = slice(start, min(start + size, 600))
        run.feed(keys[:, :, part], values[:, :, part], None, valid[:, part] if padding else None)
        run.layer.check_crop(min(128, part.stop - start))
    run.check_rows(hold=128)


@pytest.mark.parametrize("taken", [1, 4, 60, 100, 128])
def test_rollback_across_a_flush(taken: int) -> None:
    """A speculated pass fills a block; rolled back and continued otherwise, nothing of it is left."""
    run = Run(2).feed(*_tokens(2, 250), 50)
    run.layer.recording = True
    run.feed(*_tokens(2, 130, seed=1), 130)  # the block of tokens 128 to 255 is complete now
    run.crop(taken)
    run.check_rows(hold=128)
    run.feed(*_tokens(2, 10, seed=2), 5, check=True)
    run.check_rows(hold=128)
    run.layer.recording = False
    run.feed(*_tokens(2, 200, seed=3), 90, check=True)
    run.check_rows()


@pytest.mark.parametrize("size", [1, 60, 300])
def test_recording_changes_no_byte(size: int) -> None:
    keys, values = _tokens(2, 600)
    run = Run(2)
    run.layer.recording = True
    run.feed(keys[:, :, :590], values[:, :, :590], size)
    run.check_rows(hold=128)
    run.layer.recording = False
    run.feed(keys[:, :, 590:], values[:, :, 590:], size)
    run.check_rows()
    assert run.layer.num_blocks == [4, 4]


# ---- rows


@pytest.mark.parametrize("rows", [[2, 0], [1], [3, 3, 1, 0, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("padding", [False, True])
def test_select_and_go_on(rows: list[int], padding: bool) -> None:
    valid = _holes([20, 128, 300, 310], 320) if padding else None
    run = Run(4).feed(*_tokens(4, 320), 100, valid)
    run.select(rows)
    run.check_rows()
    run.check_dense(run.dense(), 320)
    run.feed(*_tokens(len(rows), 150, seed=5), 40, check=True)
    run.check_rows()


def test_selected_rows_share_nothing() -> None:
    run = Run(2).feed(*_tokens(2, 320))
    run.select([1, 1, 0])
    keys, values = _tokens(3, 200, seed=5)
    keys[0] += 1
    run.feed(keys, values, 64)
    run.check_rows()
    assert not torch.equal(run.layer.records[0, 2:4], run.layer.records[1, 2:4])


# ---- a fixed size


@pytest.mark.parametrize("max_length", [1, 100, 128, 600, 640])
@pytest.mark.parametrize("size", [1, 50, 129, 640])
def test_max_length_is_allocated_once(max_length: int, size: int) -> None:
    run = Run(2, max_length=max_length)
    places = {name: x.data_ptr() for name, x in run.layer.tensors().items()}
    held = sum(x.nbytes for x in run.layer.tensors().values())
    run.feed(*_tokens(2, max_length), size)
    run.check_rows()
    assert {name: x.data_ptr() for name, x in run.layer.tensors().items()} == places
    assert sum(x.nbytes for x in run.layer.tensors().values()) == held


@pytest.mark.parametrize("size", [1, 640, 769])
@pytest.mark.parametrize("padding", ["left", "holes", "late"])
def test_max_length_is_allocated_once_for_padded_rows(padding: str, size: int) -> None:
    """Also where one row has many blocks and another one gets its first two in one pass ("late")."""
    columns = 769
    valid = {
        "left": _left_padded([100, 700, 769], columns),
        "holes": _holes([100, 700, 769], columns),
        "late": torch.stack((torch.arange(columns) < 640, torch.arange(columns) >= 513, torch.arange(columns) < 0)),
    }[padding]
    run = Run(3, max_length=columns)
    places = {name: x.data_ptr() for name, x in run.layer.tensors().items()}
    run.feed(*_tokens(3, columns), size, valid)
    run.check_rows()
    assert {name: x.data_ptr() for name, x in run.layer.tensors().items()} == places


@pytest.mark.parametrize("new", [1, 11, 200])
def test_overflow_is_refused_before_anything_is_stored(new: int) -> None:
    run = Run(2, max_length=300).feed(*_tokens(2, 300 - min(new, 10) + 1 if new < 200 else 150))
    before = _snapshot(run)
    with pytest.raises(ValueError, match="max_length 300"):
        run.layer.append(*_tokens(2, new, seed=5), None)
    assert _unchanged(run, before)
    run.check_rows()
    rest = 300 - run.layer.columns
    if rest:
        run.feed(*_tokens(2, rest, seed=6))
        run.check_rows()


def test_growing_keeps_what_is_there() -> None:
    run = Run(1)
    for step in range(12):
        run.feed(*_tokens(1, 200, seed=step))
        run.check_rows()
    # room for at most a quarter more than needed
    assert run.layer.num_blocks[0] <= run.layer.records.shape[1] <= 1.25 * run.layer.num_blocks[0]


# ---- tokens of another model


@pytest.mark.parametrize("wrong", ["batch", "heads", "key_dim", "value_dim", "dtype", "value_dtype"])
def test_tokens_of_another_model_are_refused(wrong: str) -> None:
    run = Run(2).feed(*_tokens(2, 140))
    before = _snapshot(run)
    keys, values = _tokens(2, 3)
    if wrong == "batch":
        keys, values = keys[:1], values[:1]
    elif wrong == "heads":
        keys, values = keys[:, :1], values[:, :1]
    elif wrong == "key_dim":
        keys = keys[..., :16]
    elif wrong == "value_dim":
        values = torch.cat((values, values), -1)
    elif wrong == "dtype":
        keys, values = keys.half(), values.half()
    else:
        values = values.half()
    with pytest.raises(ValueError, match="belongs to another model"):
        run.layer.append(keys, values, None)
    assert _unchanged(run, before)


def test_what_cannot_be_stored_is_refused() -> None:
    def make(config: OscarConfig, key_dim: int, value_dim: int, dtype: torch.dtype, other: torch.dtype) -> LayerState:
        keys, values = torch.zeros(1, 1, 1, key_dim, dtype=dtype), torch.zeros(1, 1, 1, value_dim, dtype=other)
        return LayerState(config, Timeline(), keys, values)

    f32 = torch.float32
    with pytest.raises(NotImplementedError, match="float64"):
        make(DEFAULT, 32, 32, torch.float64, torch.float64)
    with pytest.raises(NotImplementedError, match="float16"):
        make(DEFAULT, 32, 32, f32, torch.float16)
    with pytest.raises(NotImplementedError, match="key head_dim 72"):
        make(DEFAULT, 72, 32, f32, f32)
    with pytest.raises(ValueError, match="value_group=64"):
        make(OscarConfig(value_group=64), 80, 80, f32, f32)


# ---- memory and storage


def _memory_cases() -> list[Run]:
    padded = Run(3).feed(*_tokens(3, 400), 130, _left_padded([10, 140, 390], 400))
    recorded = Run(1)
    recorded.layer.recording = True
    recorded.feed(*_tokens(1, 300), 10)
    return [
        Run(2),
        Run(2).feed(*_tokens(2, 300)),
        Run(2, max_length=1000).feed(*_tokens(2, 300)),
        padded,
        recorded,
        *(Run(1, config).feed(*_tokens(1, 400)) for config in VARIANTS.values()),
    ]


def test_memory_bytes_is_every_tensor() -> None:
    for run in _memory_cases():
        memory, layer = run.layer.memory_bytes(), run.layer
        assert sum(memory.values()) == sum(x.nbytes for x in layer.tensors().values())
        # every tensor that the object holds is among tensors()
        own = {name for name, x in vars(layer).items() if isinstance(x, Tensor)}
        assert own == set(layer.tensors())
        blocks, sizes = sum(layer.num_blocks), layer.layout.sizes
        codes = blocks * HEADS * (sizes["key_codes"] + sizes["value_codes"])
        norm_heads = 1 if run.config.scale_scope == "all" else HEADS
        assert memory["codes"] == codes
        assert memory["scales_zeros"] == blocks * HEADS * layer.layout.record_bytes - codes
        assert memory["norms"] == (0 if layer.norms is None else blocks * norm_heads * 128 * 2)
        assert memory["tail"] == layer.tail_keys.nbytes + layer.tail_values.nbytes
        assert memory["sinks"] == layer.batch * HEADS * run.config.num_sinks * (KEY_DIM + VALUE_DIM) * 4
        numbers = 0 if layer.equalizer is None else layer.batch * HEADS * KEY_DIM
        assert memory["equalizer"] == numbers * (4 + 8)  # the vector, and the power of the queries in float64
        assert min(memory.values()) >= 0


def _store(run: Run) -> dict[str, Any]:
    """Through torch.save, as a file that only holds tensors and plain values."""
    buffer = io.BytesIO()
    torch.save({"layer": state_of(run.layer), "timeline": run.timeline.state_dict()}, buffer)
    buffer.seek(0)
    stored: dict[str, Any] = torch.load(buffer, weights_only=True)
    return stored


def _restore(run: Run, stored: dict[str, Any], max_length: int | None = None) -> Run:
    """A new cache from ``stored``, holding what ``run`` holds."""
    other = copy.copy(run)
    other.timeline = Timeline()
    other.timeline.load_state_dict(stored["timeline"])
    other.layer = layer_from(stored["layer"], run.config, other.timeline, max_length)
    other.keys, other.values = list(run.keys), list(run.values)
    other.columns = [list(x) for x in run.columns]
    return other


@pytest.mark.parametrize("variant", ["default", *VARIANTS])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("length", [90, 320])
def test_state_goes_to_a_file_and_goes_on(variant: str, padding: bool, length: int) -> None:
    config = DEFAULT if variant == "default" else VARIANTS[variant]
    valid = _holes([0, 20, length], length) if padding else None
    run = Run(3, config).feed(*_tokens(3, length), 100, valid)
    other = _restore(run, _store(run), 700)
    other.check_rows()
    other.check_dense(other.dense(), length)
    rest = _tokens(3, 230, seed=5)
    run.feed(*rest, 60)
    other.feed(*rest, 60, check=True)
    other.check_rows()
    assert torch.equal(run.layer.records[:, : max(run.layer.num_blocks)],
                       other.layer.records[:, : max(other.layer.num_blocks)])  # fmt: skip
    assert torch.equal(run.dense()[0], other.dense()[0])


def test_state_of_a_recording_layer() -> None:
    run = Run(1)
    run.layer.recording = True
    run.feed(*_tokens(1, 300), 50)
    other = _restore(run, _store(run))
    assert other.layer.recording
    other.crop(128)
    other.feed(*_tokens(1, 300, seed=5), 50)
    other.check_rows(hold=128)


def test_state_holds_no_unused_room() -> None:
    run = Run(2, max_length=2000).feed(*_tokens(2, 300))
    state = state_of(run.layer)
    assert state["records"].shape[1] == state["norms"].shape[1] == 2
    assert state["records"].untyped_storage().nbytes() == state["records"].nbytes


def test_state_is_a_snapshot() -> None:
    """It stays what it was when the cache goes on."""
    run = Run(2).feed(*_tokens(2, 300), None, _holes([250, 300], 300))
    held = _restore(run, _store(run))  # by way of a file: certainly a copy
    state = {"layer": state_of(run.layer), "timeline": run.timeline.state_dict()}
    run.crop(20)
    run.feed(*_tokens(2, 200, seed=5), 30, _holes([100, 150], 200, seed=4))
    first = _restore(held, state)
    first.check_rows()
    first.check_dense(first.dense(), 300)


def test_a_cache_does_not_write_into_the_state_that_it_came_from() -> None:
    run = Run(2).feed(*_tokens(2, 300), None, _holes([250, 300], 300))
    stored = _store(run)
    first = _restore(run, stored)
    first.crop(20)
    first.feed(*_tokens(2, 200, seed=6), 30, _holes([100, 150], 200, seed=4))
    first.check_rows()
    second = _restore(run, stored)
    second.check_rows()
    second.check_dense(second.dense(), 300)


# ---- the timeline


def test_layers_share_the_timeline() -> None:
    """Each layer of a pass registers the same columns; they count once."""
    timeline = Timeline()
    keys, values = _tokens(3, 200)
    layers = [LayerState(DEFAULT, timeline, keys, values) for _ in range(3)]
    valid = _holes([50, 120, 200], 200)
    for start in range(0, 200, 70):
        part = slice(start, min(start + 70, 200))
        for layer in layers:
            layer.commit(layer.append(keys[:, :, part], values[:, :, part], valid[:, part]))
    assert timeline.lengths == [50, 120, 200]
    assert timeline.columns == 200
    for layer in layers[1:]:
        for name, x in layers[0].tensors().items():
            used = slice(None, max(layer.num_blocks)) if name in ("records", "norms") else slice(None)
            assert torch.equal(x[:, used], getattr(layer, name)[:, used])


def test_layers_out_of_step_are_refused() -> None:
    timeline = Timeline()
    keys, values = _tokens(1, 10)
    first, second = (LayerState(DEFAULT, timeline, keys, values) for _ in range(2))
    first.commit(first.append(keys, values, None))
    first.commit(first.append(keys, values, None))
    with pytest.raises(RuntimeError, match="out of step"):
        second.append(keys, values, None)


@pytest.mark.parametrize("late", [False, True])
def test_columns_of_slots(late: bool) -> None:
    """Against a plain list per row, with padding from the start or only later, and cropped in between."""
    timeline, own = Timeline(), [[], [], []]  # type: ignore[var-annotated]
    generator = torch.Generator().manual_seed(0)
    start = 0
    for q_len in (5, 1, 30, 1, 1, 64, 2):
        valid = torch.rand(3, q_len, generator=generator) < 0.6
        if late and start < 30:
            valid[:] = True
        step = timeline.extend(start, 3, q_len, valid)
        for b in range(3):
            tokens = valid[b].nonzero().flatten().tolist()
            own[b] += [start + c for c in tokens]
            assert step.counts[b] == len(tokens)
            if step.order is not None:
                assert step.order[b, : len(tokens)].tolist() == tokens
        start += q_len
        if q_len == 30:
            assert timeline.cropped(12) == [sum(c < start - 12 for c in x) for x in own]
            timeline.crop(12)
            start -= 12
            own = [[c for c in x if c < start] for x in own]
        assert timeline.lengths == [len(x) for x in own]
        assert timeline.columns == start
        if timeline.column_of_slot is None:
            assert all(x == list(range(start)) for x in own)
        else:
            for b in range(3):
                assert timeline.column_of_slot[b, : len(own[b])].tolist() == own[b]
    timeline.clear()
    assert dataclasses.asdict(timeline) == dataclasses.asdict(Timeline())
