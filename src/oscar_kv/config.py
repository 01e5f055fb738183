"""What to quantize and how: every field is a quantity of the method."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

BLOCK_TOKENS = 128  # tokens in a packed block; a group of tokens never crosses a block
REPORT_FORMAT = 1  # of the reports of ``oscar-kv diagnose``

Bits = Literal[2, 3, 4, 8, 16]
Metadata = Literal["float16", "bfloat16", "float8_e4m3"]
TokenNorm = Literal["l2", "max", "mean_abs"]
Fit = Literal["minmax", "lstsq"]

_GROUPS = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class OscarConfig:
    """How an :class:`~oscar_kv.OscarCache` quantizes keys and values (OScaR, arXiv 2605.19660, section 4).

    The default is our recommendation: 2-bit keys and values at about 2.42 bits per element, metadata included.
    :meth:`quality`, :meth:`four_bit` and :meth:`paper` are the other presets; ``dataclasses.replace`` changes a field.

    Args:
        key_bits: Bits per key code: 2, 3, 4 or 8; 16 leaves the keys in the model's dtype.
        value_bits: The same for values.
        key_group: Consecutive tokens that share one scale and zero point per key channel.
        value_group: Consecutive channels that share one scale and zero point per value token. It must divide
            the head dimension; None takes the largest of 64, 32 and 16 that does.
        rotate_keys: Rotate keys (and queries) by a Hadamard matrix per head (Canalized Rotation).
        rotate_values: Rotate values per head, and the attention output back.
        token_norm: Norm that is taken out of each token's key (Omni-Token Scaling), or None for no scaling.
        scale_scope: One norm per token over all KV heads ("all"), or one per token and head ("head").
        equalize: Exponent of the channel equalization before the key rotation; 0 switches it off.
        equalize_queries: Exponent of the queries in the equalization; 0 looks at keys alone.
        metadata: Storage of scales and zero points.
        zero_point: "float" stores the offset of the grid as it is; "int" rounds it to a whole number of steps.
        key_fit: How a key group's range is found: "minmax", or "lstsq" (least squares, from the shrunk range).
        value_fit: The same for values.
        key_shrink: Factor on a key group's min/max range, in (0, 1].
        value_shrink: The same for values.
        value_gain: Factor in [1, 2] on a value group's scale once its codes are chosen. The nearest points of a coarse
            grid lie nearer the center than the values do, and so would an average over tokens.
        num_sinks: Tokens at the start of each sequence that stay in 16 bit and out of all statistics.
        residual_length: The newest tokens stay in 16 bit; a block of 128 is packed when this many are there.
        layers: Fields that differ in single layers, by the number of the layer: ``{18: {"value_bits": 4}}``. All but
            ``residual_length`` may.

    Raises:
        ValueError: A field has an unsupported value.
    """

    key_bits: Bits = 2
    value_bits: Bits = 2
    key_group: int = 32
    value_group: int | None = None
    rotate_keys: bool = True
    rotate_values: bool = True
    token_norm: TokenNorm | None = "l2"
    scale_scope: Literal["all", "head"] = "all"
    equalize: float = 0.5
    equalize_queries: float = 0.25
    metadata: Metadata = "float8_e4m3"
    zero_point: Literal["float", "int"] = "float"
    key_fit: Fit = "minmax"
    value_fit: Fit = "lstsq"
    key_shrink: float = 0.9
    value_shrink: float = 0.85
    value_gain: float = 1.0
    num_sinks: int = 4
    residual_length: int = BLOCK_TOKENS
    layers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    @classmethod
    def quality(cls) -> OscarConfig:
        """3-bit keys and 2-bit values, about 2.92 bits per element: fewer than the published method takes."""
        return cls(key_bits=3, key_shrink=1.0, value_gain=1.1)

    @classmethod
    def four_bit(cls) -> OscarConfig:
        """4-bit keys and values, about 5.04 bits per element: for models that 2 bits harm."""
        return cls(key_bits=4, value_bits=4, value_group=32, metadata="float16", key_shrink=1.0, value_shrink=1.0)

    @classmethod
    def paper(cls) -> OscarConfig:
        """The released method: groups of 32, integer zero point, min/max ranges, no sinks, no equalization."""
        return cls(
            value_group=32,
            equalize=0.0,
            metadata="float16",
            zero_point="int",
            value_fit="minmax",
            key_shrink=1.0,
            value_shrink=1.0,
            num_sinks=0,
        )

    @classmethod
    def from_report(cls, report: str | PathLike[str] | Mapping[str, Any]) -> OscarConfig:
        """What ``oscar-kv diagnose`` recommends, or ``oscar-kv allocate`` has found.

        Args:
            report: The path of a ``report.json``, or of what ``allocate`` wrote; or what is in it.

        Raises:
            ValueError: It is no such report, or one of another version.
        """
        if not isinstance(report, Mapping):
            try:
                report = json.loads(Path(report).read_text(encoding="utf-8"))
            except ValueError as error:  # of the decoding of its bytes, or of JSON
                raise ValueError(f"{report} is not a report of oscar-kv diagnose or allocate: {error}") from error
        found = report.get("format") if isinstance(report, Mapping) else None
        if not isinstance(report, Mapping) or found != REPORT_FORMAT:
            raise ValueError(f"not a report of oscar-kv diagnose in format {REPORT_FORMAT}: its format is {found!r}")
        recommendation = report.get("recommendation")
        chosen = recommendation.get("config") if isinstance(recommendation, Mapping) else None
        if not isinstance(chosen, Mapping):
            raise ValueError("the report recommends no configuration")
        if unknown := sorted(set(chosen) - {field.name for field in fields(cls)}):
            raise ValueError(f"the report's configuration has unknown fields: {', '.join(unknown)}")
        return cls(**chosen)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("key_bits", get_args(Bits)),
            ("value_bits", get_args(Bits)),
            ("key_group", _GROUPS),
            ("value_group", (None, *_GROUPS)),
            ("token_norm", (None, *get_args(TokenNorm))),
            ("scale_scope", ("all", "head")),
            ("metadata", get_args(Metadata)),
            ("zero_point", ("float", "int")),
            ("key_fit", get_args(Fit)),
            ("value_fit", get_args(Fit)),
            ("rotate_keys", (True, False)),
            ("rotate_values", (True, False)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")
        for name in ("key_shrink", "value_shrink"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in (0, 1], not {getattr(self, name)!r}")
        if not 1.0 <= self.value_gain <= 2.0:
            raise ValueError(f"value_gain must be in [1, 2], not {self.value_gain!r}")
        for name in ("equalize", "equalize_queries"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is an exponent in [0, 1], not {getattr(self, name)!r}")
        if not (isinstance(self.num_sinks, int) and 0 <= self.num_sinks < BLOCK_TOKENS):
            raise ValueError(f"num_sinks must be an int in [0, {BLOCK_TOKENS}), not {self.num_sinks!r}")
        if not isinstance(self.residual_length, int) or self.residual_length < 1 or self.residual_length % BLOCK_TOKENS:
            raise ValueError(f"residual_length must be a multiple of {BLOCK_TOKENS}, not {self.residual_length!r}")
        if self.zero_point == "int" and self.metadata == "float8_e4m3":
            raise ValueError("zero_point='int' needs 16-bit metadata: fp8 cannot hold a whole number of steps")
        if self.zero_point == "int" and "lstsq" in (self.key_fit, self.value_fit):
            raise ValueError("zero_point='int' needs fit 'minmax': least squares moves the offset off the steps")
        if self.zero_point == "int" and self.value_gain != 1.0:
            raise ValueError("zero_point='int' needs value_gain 1: with another the offset is no whole number of steps")
        self._check_layers()

    def _check_layers(self) -> None:
        known = {field.name for field in fields(self)} - {"layers", "residual_length"}
        if not isinstance(self.layers, Mapping):
            raise ValueError(f"layers must map numbers of layers to their fields, not {self.layers!r}")
        layers: dict[int, dict[str, Any]] = {}
        for index, own in self.layers.items():
            if not str(index).isdecimal() or not isinstance(own, Mapping):  # in JSON the numbers are strings
                raise ValueError(f"layers must map numbers of layers to their fields, not {index!r} to {own!r}")
            if unknown := sorted(set(own) - known):
                raise ValueError(f"layers[{index}]: what may differ is not {', '.join(unknown)}")
            layers[int(index)] = dict(own)
        object.__setattr__(self, "layers", dict(sorted(layers.items())))
        for index in self.layers:
            self._check_layer(index)

    def _check_layer(self, index: int) -> None:
        try:
            self.for_layer(index)
        except ValueError as error:
            raise ValueError(f"layers[{index}]: {error}") from error

    def for_layer(self, index: int) -> OscarConfig:
        """What one layer's keys and values are quantized with: the same for all, but for those in ``layers``."""
        return replace(self, layers={}, **self.layers.get(index, {})) if self.layers else self

    def resolve_value_group(self, head_dim: int) -> int:
        """Channels per value group at this value head dimension.

        Raises:
            ValueError: ``value_group`` does not divide ``head_dim``.
        """
        if self.value_group is None:
            return next((g for g in (64, 32, 16) if head_dim % g == 0), head_dim)
        if head_dim % self.value_group:
            raise ValueError(
                f"value_group={self.value_group} does not divide the value head_dim {head_dim}; "
                "leave value_group=None to let it be chosen"
            )
        return self.value_group

    def check_head_dim(self, key_dim: int, value_dim: int) -> None:
        """Refuse head dimensions that the byte layout cannot hold.

        Raises:
            NotImplementedError: A head dimension is no multiple of 16 in [16, 512].
            ValueError: ``value_group`` does not divide ``value_dim``.
        """
        for name, dim in (("key", key_dim), ("value", value_dim)):
            if dim % 16 or not 16 <= dim <= 512:
                raise NotImplementedError(f"{name} head_dim {dim}: only multiples of 16 from 16 to 512 are supported")
        self.resolve_value_group(value_dim)
