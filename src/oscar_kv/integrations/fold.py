"""The rotation of the values folded into the weights: nothing is left of it to be computed.

Values are linear in the hidden state and attention is linear in the values. So ``H`` can be multiplied into the rows of
``v_proj`` and, since it undoes itself, into the columns of ``o_proj`` (per head; ``docs/method.md``, step 1).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from transformers import PreTrainedModel

from oscar_kv.rotate import rotate

_OUTPUTS = ("o_proj", "out_proj", "dense")  # what models call the projection after attention
_PROBE_TOKENS = 16
_NEAR = {torch.float32: 1e-3}  # distance of logits before and after, relative to their size
_NEAR_16_BIT = 0.25  # weights are rounded once more, and experts may change


@dataclass(frozen=True)
class _Projections:
    """The projections around the attention of one layer, whose heads have values of this dimension."""

    value: Linear
    output: Linear
    dim: int


class FoldedValues:
    """A model whose packed layers get their values rotated; :meth:`undo` gives the weights back bit for bit.

    Weights are written in place, computed in float32 and rounded once; the originals are kept on the CPU. In between
    they must neither be changed nor saved.

    Args:
        model: The model that writes text.
        layers: Indices of the layers to fold.

    Raises:
        NotImplementedError: The rotation does not commute with what a layer does, or its weights must not be touched.
    """

    def __init__(self, model: PreTrainedModel, layers: list[int]) -> None:
        found = _attentions(model)
        shared = _shared_weights(model)
        folds = [_projections(index, found.get(index, []), shared) for index in layers]
        before = _probe(model)
        self._kept: list[tuple[Tensor, Tensor]] = []
        for fold in folds:
            self._write(fold.value.weight, _rotate_rows(fold.value.weight, fold.dim))
            if fold.value.bias is not None:
                self._write(fold.value.bias, _rotate_rows(fold.value.bias, fold.dim))
            self._write(fold.output.weight, _rotate_columns(fold.output.weight, fold.dim))
        error = float((_probe(model) - before).norm() / before.norm())
        if not error < _NEAR.get(model.dtype, _NEAR_16_BIT):
            self.undo()
            raise NotImplementedError(
                f"values cannot be folded in {type(model).__name__}: logits move by {error:.1%}, "
                "so something must stand between attention and its projections"
            )

    def _write(self, weight: Tensor, new: Tensor) -> None:
        self._kept.append((weight, weight.detach().to("cpu", copy=True)))
        with torch.no_grad():
            weight.copy_(new)

    def undo(self) -> None:
        with torch.no_grad():
            for weight, original in self._kept:
                weight.copy_(original)
        self._kept.clear()


def _rotate_rows(weight: Tensor, dim: int) -> Tensor:
    """float32 weight (heads * dim, ...) with each head's rows rotated."""
    heads = weight.detach().float().unflatten(0, (-1, dim))
    return rotate(heads.transpose(1, -1)).transpose(1, -1).flatten(0, 1)


def _rotate_columns(weight: Tensor, dim: int) -> Tensor:
    """float32 weight (n, heads * dim) with each head's columns rotated."""
    return rotate(weight.detach().float().unflatten(1, (-1, dim))).flatten(1)


def _attentions(model: PreTrainedModel) -> dict[int, list[Module]]:
    """The attention modules of the text decoder by the layer of the cache that they write."""
    decoder = model.config.get_text_config(decoder=True)
    found: dict[int, list[Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and getattr(module, "config", None) is decoder and _is_attention(module):
            found.setdefault(index, []).append(module)
    return found


def _is_attention(module: Module) -> bool:
    return "Attention" in type(module).__name__ and hasattr(module, "head_dim")


def _projections(index: int, found: list[Module], shared: set[int]) -> _Projections:
    """The projections of a layer, if the rotation can be folded into them."""

    def refuse(reason: str) -> NotImplementedError:
        return NotImplementedError(f"values of layer {index} cannot be folded: {reason}")

    module: Any = found[0] if len(found) == 1 else None
    value = getattr(module, "v_proj", None)
    output = next((getattr(module, name) for name in _OUTPUTS if hasattr(module, name)), None)
    if value is None or output is None:
        raise refuse("no attention module has a v_proj and o_proj for it alone; they are fused or shared")
    for name, linear in (("v_proj", value), ("the output projection", output)):
        if type(linear) is not Linear or not linear.weight.is_floating_point():
            raise refuse(f"{name} is a {type(linear).__name__}; quantized or adapted weights are not touched")
        if linear.weight.device.type == "meta":
            raise refuse(f"the weight of {name} is not loaded")
        if id(linear.weight) in shared:
            raise refuse(f"the weight of {name} is shared with another module")
    if hasattr(module, "v_norm"):
        raise refuse("a norm stands between v_proj and attention")
    dim = int(getattr(module, "v_head_dim", None) or module.head_dim)
    query = getattr(module, "q_proj", None)
    heads, rest = divmod(output.in_features, dim)
    if rest or value.out_features % dim:
        raise refuse(f"projections of {value.out_features} and {output.in_features} have no heads of {dim}")
    if isinstance(query, Linear) and query.out_features == 2 * heads * int(module.head_dim):
        raise refuse("an output gate stands between attention and the output projection")
    return _Projections(value, output, dim)


def _shared_weights(model: PreTrainedModel) -> set[int]:
    """Ids of the weights that several modules have, or a module that stands in several places."""
    names = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    return {key for key, count in names.items() if count > 1}


@torch.no_grad()
def _probe(model: PreTrainedModel) -> Tensor:
    """Logits of a few tokens, without a cache."""
    ids = torch.arange(2, 2 + _PROBE_TOKENS, device=model.device).unsqueeze(0)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()
