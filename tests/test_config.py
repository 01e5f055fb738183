"""OscarConfig: refused values, presets, and what a head dimension resolves to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from oscar_kv.config import OscarConfig
from oscar_kv.pack import RecordLayout

BAD = [
    *[("key_bits", x) for x in (0, 1, 5, 6, 7, 32, -2, None, "2")],
    *[("value_bits", x) for x in (0, 1, 5, 6, 7, 32, -2, None, "2")],
    *[("key_group", x) for x in (0, 8, 24, 48, 256, -32, None)],
    *[("value_group", x) for x in (0, 8, 24, 48, 256, -32)],
    *[("rotate_keys", x) for x in (None, "yes", 2)],
    *[("rotate_values", x) for x in (None, "yes", 2)],
    *[("token_norm", x) for x in ("l1", "", False)],
    *[("scale_scope", x) for x in ("token", None, "")],
    *[(name, x) for name in ("equalize", "equalize_queries") for x in (-0.1, 1.1, float("nan"), float("inf"))],
    *[("metadata", x) for x in ("float32", "fp16", "float8_e5m2", None)],
    *[("zero_point", x) for x in ("none", None, 0)],
    *[("key_fit", x) for x in ("mse", None)],
    *[("value_fit", x) for x in ("mse", None)],
    *[("key_shrink", x) for x in (0.0, -0.5, 1.01, float("nan"), float("inf"))],
    *[("value_shrink", x) for x in (0.0, -0.5, 1.01, float("nan"), float("inf"))],
    *[("value_gain", x) for x in (0.0, 0.99, 2.01, float("nan"), float("inf"))],
    *[("num_sinks", x) for x in (-1, 128, 1000, 1.5, None, "4")],
    *[("residual_length", x) for x in (0, -128, 1, 64, 127, 129, 200, 128.0, None, "128")],
    *[("layers", x) for x in (None, [1], {"a": {}}, {0.5: {}}, {-1: {}}, {0: None}, {0: {"key_bits": 5}})],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        OscarConfig(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"zero_point": "int"},  # the default metadata is fp8
        {"zero_point": "int", "metadata": "float16"},  # the default value_fit is least squares
        {"zero_point": "int", "metadata": "float16", "key_fit": "lstsq", "value_fit": "minmax"},
        {"zero_point": "int", "metadata": "float16", "value_fit": "minmax", "value_gain": 1.1},
    ],
)
def test_integer_zero_point_needs_16_bit_metadata_and_minmax(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="zero_point"):
        OscarConfig(**fields)


def test_every_field_is_checked() -> None:
    """A field added later needs its bad values here."""
    assert {name for name, _ in BAD} == {field.name for field in dataclasses.fields(OscarConfig)}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("key_bits", (2, 3, 4, 8, 16)),
        ("value_bits", (2, 3, 4, 8, 16)),
        ("key_group", (16, 32, 64, 128)),
        ("value_group", (None, 16, 32, 64, 128)),
        ("token_norm", (None, "l2", "max", "mean_abs")),
        ("scale_scope", ("all", "head")),
        ("equalize", (0, 0.0, 0.25, 1.0)),
        ("equalize_queries", (0, 0.0, 0.25, 1.0)),
        ("metadata", ("float16", "bfloat16", "float8_e4m3")),
        ("key_fit", ("minmax", "lstsq")),
        ("value_fit", ("minmax", "lstsq")),
        ("key_shrink", (1e-3, 0.5, 1.0)),
        ("value_gain", (1.0, 1.1, 2.0)),
        ("num_sinks", (0, 4, 127)),
        ("residual_length", (128, 256, 1024)),
        ("layers", ({}, {0: {}}, {7: {"value_bits": 4, "metadata": "float16"}})),
    ],
)
def test_good_values_are_kept(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(OscarConfig(**{name: value}), name) == value


def test_config_is_frozen_hashable_and_replaceable() -> None:
    config = OscarConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.key_bits = 4  # type: ignore[misc]
    assert hash(config) == hash(OscarConfig())
    assert dataclasses.replace(config, key_bits=4) == OscarConfig(key_bits=4) != config
    with pytest.raises(ValueError, match="key_bits"):
        dataclasses.replace(config, key_bits=5)
    with pytest.raises(TypeError):
        OscarConfig(2)  # type: ignore[misc] # positions would be guesswork


def test_presets() -> None:
    default = OscarConfig()
    assert (default.key_bits, default.value_bits, default.key_group, default.value_group) == (2, 2, 32, None)
    assert (default.metadata, default.equalize, default.num_sinks) == ("float8_e4m3", 0.5, 4)
    quality = OscarConfig.quality()
    assert quality == dataclasses.replace(default, key_bits=3, key_shrink=1.0, value_gain=1.1)
    four = OscarConfig.four_bit()
    assert (four.key_bits, four.value_bits, four.value_group, four.metadata) == (4, 4, 32, "float16")
    assert (four.key_shrink, four.value_shrink) == (1.0, 1.0)
    # what the released method does, field by field
    assert dataclasses.asdict(OscarConfig.paper()) == {
        "key_bits": 2,
        "value_bits": 2,
        "key_group": 32,
        "value_group": 32,
        "rotate_keys": True,
        "rotate_values": True,
        "token_norm": "l2",
        "scale_scope": "all",
        "equalize": 0.0,
        "equalize_queries": 0.25,  # without effect
        "metadata": "float16",
        "zero_point": "int",
        "key_fit": "minmax",
        "value_fit": "minmax",
        "key_shrink": 1.0,
        "value_shrink": 1.0,
        "value_gain": 1.0,
        "num_sinks": 0,
        "residual_length": 128,
        "layers": {},
    }


@pytest.mark.parametrize(
    ("config", "promised"),
    [(OscarConfig(), 2.42), (OscarConfig.quality(), 2.92), (OscarConfig.four_bit(), 5.04)],
    ids=["default", "quality", "four_bit"],
)
@pytest.mark.parametrize(("head_dim", "heads"), [(128, 8), (128, 4), (128, 2), (64, 8), (256, 4)])
def test_bits_per_element_that_the_presets_promise(
    config: OscarConfig, promised: float, head_dim: int, heads: int
) -> None:
    """Bits of a packed block, token norms (one bf16 number for all heads) included."""
    layout = RecordLayout(config, head_dim, head_dim, torch.bfloat16)
    bits = 8 * (layout.record_bytes + 2 * 128 / heads) / (2 * 128 * head_dim)
    assert promised - 0.05 < bits <= promised


@pytest.mark.parametrize(
    ("value_group", "head_dim", "expected"),
    [
        (None, 16, 16),
        (None, 48, 16),
        (None, 80, 16),
        (None, 112, 16),
        (None, 32, 32),
        (None, 96, 32),
        (None, 160, 32),
        (None, 64, 64),
        (None, 128, 64),
        (None, 192, 64),
        (None, 256, 64),
        (None, 512, 64),
        (16, 80, 16),
        (32, 96, 32),
        (64, 128, 64),
        (128, 256, 128),
    ],
)
def test_resolve_value_group(value_group: Any, head_dim: int, expected: int) -> None:
    assert OscarConfig(value_group=value_group).resolve_value_group(head_dim) == expected


@pytest.mark.parametrize(("value_group", "head_dim"), [(64, 80), (32, 80), (64, 96), (128, 64), (128, 192)])
def test_value_group_that_does_not_divide_is_refused(value_group: Any, head_dim: int) -> None:
    config = OscarConfig(value_group=value_group)
    with pytest.raises(ValueError, match=f"value_group={value_group}.*{head_dim}"):
        config.resolve_value_group(head_dim)
    with pytest.raises(ValueError, match="value_group"):
        config.check_head_dim(64, head_dim)


@pytest.mark.parametrize("bad", [0, 8, 24, 72, 100, 520, 528, 576])
def test_head_dims_that_the_layout_cannot_hold_are_refused(bad: int) -> None:
    with pytest.raises(NotImplementedError, match=f"key head_dim {bad}"):
        OscarConfig().check_head_dim(bad, 64)
    with pytest.raises(NotImplementedError, match=f"value head_dim {bad}"):
        OscarConfig().check_head_dim(64, bad)


def test_every_multiple_of_16_up_to_512_is_accepted() -> None:
    for dim in range(16, 513, 16):
        OscarConfig().check_head_dim(dim, 528 - dim)
