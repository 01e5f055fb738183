"""RTN: plain round to nearest per token."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_kv.baselines.base import Apart, Codec, GroupedMethod, LayerShape, TokenGroups


@dataclass(frozen=True, kw_only=True)
class RTN(GroupedMethod):
    """Round to nearest, keys (after RoPE) and values per token and head: the plain baseline of all the papers.

    ``s = (max x - min x) / (2**b - 1)``, ``x^ = s round((x - min x) / s) + min x`` over groups of channels, at
    ``b + 32 / group`` bits per number.
    """

    def codec(self, shape: LayerShape) -> Codec:
        return Apart(TokenGroups(self.groups(shape.key_dim)), TokenGroups(self.groups(shape.value_dim)))
