"""The padding mask of a batch, for attentions that do not show it to the cache."""

from __future__ import annotations

import torch
from torch import Tensor


class Padding:
    """Where the padding of a batch is, for attentions that do not tell the cache."""

    def __init__(self, attention_mask: Tensor | None) -> None:
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be (batch, columns), not {tuple(attention_mask.shape)}")
        self.mask = None if attention_mask is None else attention_mask.bool()

    def columns(self, start: int, batch: int, q_len: int, device: torch.device) -> Tensor | None:
        """bool (batch, q_len): which of these columns are tokens; None where all are."""
        if self.mask is None:
            if batch > 1:
                raise ValueError(
                    "with this attention the cache cannot see the padding of a batch: give "
                    "OscarCache(attention_mask=...) (all ones where there is none), or use attention "
                    "'oscar' or oscar_kv.enable(model)"
                )
            return None
        rows = self.mask.shape[0]
        if batch % rows:
            raise ValueError(f"attention_mask has {rows} rows, the batch {batch}")
        mask = self.mask[:, start : start + q_len].repeat_interleave(batch // rows, 0).to(device)  # beams, n > 1
        ones = mask.new_ones(batch, q_len - mask.shape[1])  # generated after the mask was made
        return torch.cat((mask, ones), dim=1)

    def select(self, rows: Tensor, batch: int) -> None:
        if self.mask is not None:
            mask = self.mask.repeat_interleave(max(1, batch // self.mask.shape[0]), 0)
            self.mask = mask[rows.to(mask.device)]
