"""RoPE undone and done again, for methods that quantize keys before it. A cache sees them after it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED = ("linear", "llama3", "yarn")  # whose frequencies do not depend on the length of the text


class Rope:
    """The rotary embedding of a layer, in the half-split form of Llama, Qwen and Gemma.

    A model that pairs neighbouring channels instead gets another rotation of its keys by position: still undone
    exactly, only not what the method means.

    Args:
        config: Configuration of the decoder.
        layer: Number of the layer.

    Raises:
        NotImplementedError: The frequencies depend on the length of the text, or there is no rotary embedding.
    """

    def __init__(self, config: PreTrainedConfig, layer: int) -> None:
        parameters = getattr(config, "rope_parameters", None) or {}
        layer_type = config.layer_types[layer] if getattr(config, "layer_types", None) else None
        typed = layer_type is not None and layer_type in parameters
        parameters = parameters[layer_type] if typed else parameters
        kind = parameters.get("rope_type")
        if kind == "default":
            dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            dim = int(dim * parameters.get("partial_rotary_factor", 1.0))
            self.frequencies = parameters["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim)
            self.gain = 1.0
        elif kind in _FIXED:
            options = {"layer_type": layer_type} if typed else {}
            self.frequencies, self.gain = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **options)
        else:
            raise NotImplementedError(f"keys before RoPE of type {kind}: only default, {', '.join(_FIXED)} can be had")

    def apply(self, x: Tensor, start: int) -> Tensor:
        """Rotate float32 (..., tokens, dim), of which the first token is at position ``start``."""
        return self._turn(x, start, 1.0) * self._gains(x)

    def undo(self, x: Tensor, start: int) -> Tensor:
        """Inverse of :meth:`apply`."""
        return self._turn(x, start, -1.0) / self._gains(x)

    def _turn(self, x: Tensor, start: int, sign: float) -> Tensor:
        positions = torch.arange(start, start + x.shape[-2], device=x.device).float()
        angle = positions.unsqueeze(1) * self.frequencies.to(x.device)
        cos, sin = angle.cos(), sign * angle.sin()
        half = angle.shape[1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def _gains(self, x: Tensor) -> Tensor:
        gains = x.new_ones(x.shape[-1])
        gains[: 2 * len(self.frequencies)] = self.gain
        return gains
