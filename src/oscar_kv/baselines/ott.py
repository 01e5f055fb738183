"""OTT, Outlier Tokens Tracing (arXiv 2505.10938): KIVI whose smallest keys are kept out of the groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.baselines.base import Codec, GroupedMethod, LayerShape
from oscar_kv.baselines.groups import Packed


@dataclass(frozen=True, kw_only=True)
class OTT(GroupedMethod):
    """Outlier Tokens Tracing (arXiv 2505.10938), built on KIVI.

    Keys (after RoPE) are rounded per channel over groups of tokens, values per token over groups of channels. In each
    block the tokens with the smallest ``sum_c |k_c|`` of the block and the pool make up the new pool; the keys and
    values of the pool are kept exactly, and in the block the mean of its other tokens takes their place. What drops
    out of the pool stays exact in a second list; when that is full, nothing is traced any more.

    Differs from the release, or is left open by the paper: the pool is per layer and KV head, the mean is that of the
    tokens that are not traced, and a head stops for good at the first block that would overfill its list. Traced tokens
    are put back into the dequantized history, which is the same as hiding their packed form and attending to them.

    Args:
        group: Tokens of a key group, and at most so many channels of a value group. It divides the block.
        pool: Tokens in the pool.
        evicted: Tokens in the second list.
        exact_layers: So many layers at first trace nothing.

    Raises:
        ValueError: The group does not divide the block, the pool does not fit into one, or there are sinks.
    """

    residual_length: int = 32
    block: int = 128
    group: int | None = 128
    pool: int = 3
    evicted: int = 32
    exact_layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_sinks or not self.group or self.block % self.group or not 0 <= self.pool < self.block:
            raise ValueError(f"no sinks, a group that divides the block, and a pool that is smaller than it: {self}")

    def codec(self, shape: LayerShape) -> Codec:
        return _Traced(self, shape)


class _Traced(Codec):
    def __init__(self, method: OTT, shape: LayerShape) -> None:
        super().__init__()
        self.method = method
        self.dtype = shape.dtype
        self.pool = 0 if shape.index < method.exact_layers else method.pool
        self.key_groups, self.value_groups = method.groups(method.block), method.groups(shape.value_dim)

    def encode(self, keys: Tensor, values: Tensor, start: int) -> Packed:
        blocks = []
        for first in range(0, keys.shape[2], self.method.block):
            part = slice(first, first + self.method.block)
            k, v = keys[:, :, part], values[:, :, part]
            if self.pool:
                traced = self._trace(k, v, start + first)
                k, v = (_fill(x, traced) for x in (k, v))
            blocks.append(self._encode_block(k, v))
        return {name: torch.cat([block[name] for block in blocks], dim=2) for name in blocks[0]}

    def _encode_block(self, keys: Tensor, values: Tensor) -> Packed:
        by_channel = self.key_groups.encode(keys.transpose(2, 3))  # (batch, heads, dim, tokens)
        packed = {f"key_{name}": x.transpose(2, 3) for name, x in by_channel.items()}
        return packed | {f"value_{name}": x for name, x in self.value_groups.encode(values).items()}

    def decode(self, packed: Packed, start: int) -> tuple[Tensor, Tensor]:
        by_channel = {name: packed[f"key_{name}"].transpose(2, 3) for name in ("codes", "scale", "center")}
        keys = self.key_groups.decode(by_channel).transpose(2, 3).contiguous()
        values = self.value_groups.decode({name: packed[f"value_{name}"] for name in by_channel})
        if self.state:
            columns = self.state["columns"]
            place = torch.where(columns >= 0, columns - start, keys.shape[2]).long()
            keys, values = (_put(x, place, self.state[name]) for name, x in (("keys", keys), ("values", values)))
        return keys, values

    def _trace(self, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Update the exact tokens by a block; which of its tokens are traced: bool (batch, heads, tokens)."""
        old = self.state or self._nothing(keys, values)
        known = old["columns"].shape[2]
        old_size = torch.where(old["pooled"], old["keys"].float().abs().sum(-1), torch.inf)
        order = torch.cat((old_size, keys.abs().sum(-1)), dim=-1).argsort(dim=-1, stable=True)
        chosen = order.argsort(dim=-1) < self.pool  # of the exact tokens and the block
        listed = ((old["columns"] >= 0) & ~chosen[:, :, :known]).sum(-1)
        stopped = old["stopped"] | (listed > self.method.evicted)
        keep = torch.cat((old["pooled"], torch.zeros_like(chosen[:, :, known:])), dim=-1)
        pooled = torch.where(stopped.unsqueeze(-1), keep, chosen)
        fresh = pooled[:, :, known:]
        new = torch.arange(start, start + keys.shape[2], dtype=torch.int32, device=keys.device)
        columns = torch.cat((old["columns"], torch.where(fresh, new, -1)), dim=-1)
        unused = columns < 0
        width = int((~unused).sum(-1).max())
        index = unused.int().argsort(dim=-1, stable=True)[:, :, :width]  # close the gaps
        tokens = {"keys": keys, "values": values}
        self.state = {
            "columns": columns.gather(2, index),
            "pooled": pooled.gather(2, index),
            "stopped": stopped,
            **{name: _take(torch.cat((old[name], x.to(old[name].dtype)), dim=2), index) for name, x in tokens.items()},
        }
        return fresh

    def _nothing(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """No exact tokens yet. Per row and head: columns, -1 where unused; whether they are in the pool; the tokens."""
        empty = keys[:, :, :0, 0]
        return {
            "columns": empty.to(torch.int32),
            "pooled": empty.bool(),
            "stopped": torch.zeros(keys.shape[:2], dtype=torch.bool, device=keys.device),
            "keys": keys[:, :, :0].to(self.dtype),
            "values": values[:, :, :0].to(self.dtype),
        }


def _take(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens (batch, heads, n, dim) at index (batch, heads, m) -> (batch, heads, m, dim)."""
    return tokens.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, tokens.shape[-1]))


def _fill(tokens: Tensor, traced: Tensor) -> Tensor:
    """Put the mean of the tokens (batch, heads, n, dim) that are not traced in the place of those that are."""
    traced = traced.unsqueeze(-1)
    mean = torch.where(traced, 0.0, tokens).sum(2, keepdim=True) / (~traced).sum(2, keepdim=True)
    return torch.where(traced, mean, tokens)


def _put(tokens: Tensor, place: Tensor, exact: Tensor) -> Tensor:
    """Write exact tokens to their places (batch, heads, m) among tokens (batch, heads, n, dim); place n is nowhere."""
    spare = torch.cat((tokens, tokens[:, :, :1]), dim=2)
    return spare.scatter(2, place.unsqueeze(-1).expand_as(exact), exact.float())[:, :, :-1]
