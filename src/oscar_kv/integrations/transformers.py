"""transformers: the attention function "oscar", and ``enable``, which makes a model's ``generate`` use it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from oscar_kv.attention import attend, new_tokens
from oscar_kv.cache import OscarCache
from oscar_kv.cache_layer import ATTENTION_NAME, HANDOFF, SHARED, OscarLayer
from oscar_kv.config import OscarConfig
from oscar_kv.integrations.fold import FoldedValues
from oscar_kv.integrations.switch import set_attention
from oscar_kv.pack import RecordLayout
from oscar_kv.view import KVView

# ``cache`` since transformers 5.24, ``past_key_values`` before
CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)  # fmt: skip

# what models pass to every attention function and the mask or the cache already accounts for
_WITHOUT_EFFECT = frozenset(
    {
        *("cache_position", "deterministic", "hidden_states", "logits_to_keep", "mm_token_type_ids"),
        *("num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("position_embeddings", "position_ids", "return_dict", "token_type_ids", "use_cache"),
    }
)


def register() -> None:
    """Make ``attn_implementation="oscar"`` known to transformers. :func:`enable` does it for you."""
    AttentionInterface.register(ATTENTION_NAME, oscar_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, oscar_mask)


class PlainMask(Tensor):
    """A mask that is causal and hides padding, and no more. Its copies on other devices are, too; nothing else is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func is Tensor.to and result.dtype == args[0].dtype else result


def oscar_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of attention "sdpa", a :class:`PlainMask` where it is one."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    if mask is not None and kwargs.get("mask_function", causal_mask_function) is causal_mask_function:
        return mask.as_subclass(PlainMask)
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]
def oscar_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a packed layer of an :class:`OscarCache`; any other keys get torch's attention.

    Args:
        module: The attention module of the model.
        query: (batch, query heads, q, key_dim).
        key: (batch, KV heads, q, key_dim), as the cache's ``update`` returned it.
        value: (batch, KV heads, q, value_dim).
        attention_mask: (batch, 1, q, columns), bool or additive, or None for a causal one.
        scaling: Factor on the scores; None is ``key_dim ** -0.5``.
        dropout: Not supported for packed layers.
        softcap: Soft cap of the scores.
        s_aux: (query heads,) learned sink logits.
        is_causal: Overrides ``module.is_causal``.
        kwargs: What the model adds; refused where it would change packed attention.

    Returns:
        (batch, q, query heads, value_dim), and None for the weights.

    Raises:
        NotImplementedError: Dropout, or an argument that packed attention does not know.
    """
    layer: OscarLayer | None = getattr(key, HANDOFF, None)
    if layer is None and softcap is None and s_aux is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out
    shared: KVView | None = getattr(key, SHARED, None)  # another layer's keys, which it has attended to
    try:
        _refuse_unknown(layer is not None, dropout, kwargs)
        if layer is not None and layer.pending is not None:
            _check_mask(attention_mask, layer.get_seq_length())
    except NotImplementedError:
        if layer is not None:
            layer.pending = None  # the pass is off, and the cache is as it was
        raise
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    commit = None
    if layer is None:
        view = _exact_view(key, value)
    elif shared is not None:
        view = shared
    else:
        state, recent = layer.take(new_tokens(attention_mask, query.shape[2]))
        view, commit = state.view(recent), (layer, recent)
        layer.share(key, view)
    output = attend(
        query,
        view,
        scaling=scaling,
        mask=attention_mask,
        softcap=softcap,
        sink_logits=s_aux,
        causal=causal,
        plain_mask=isinstance(attention_mask, PlainMask),
    )
    if commit is not None:
        commit[0].commit(commit[1], query)
    return output.transpose(1, 2).contiguous(), None


def _refuse_unknown(packed: bool, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(f"attention '{ATTENTION_NAME}' has no dropout: call model.eval()")
    known = _WITHOUT_EFFECT if packed else _WITHOUT_EFFECT | {"sliding_window"}  # the mask has the window
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in known)
    if unknown:
        raise NotImplementedError(
            f"attention '{ATTENTION_NAME}' does not know the argument(s) {', '.join(unknown)}; use attention 'sdpa'"
        )


def _check_mask(mask: Tensor | None, cached: int) -> None:
    """Refuse a mask that a model made itself from the keys and values it got, which are the new ones alone."""
    if mask is not None and mask.shape[-1] <= cached:
        raise NotImplementedError(
            f"a mask of {mask.shape[-1]} columns over {cached} cached tokens: this model looks into its cache by "
            "itself; use attention 'sdpa'"
        )


def _exact_view(key: Tensor, value: Tensor) -> KVView:
    """A view of keys and values of which none is packed."""
    layout = RecordLayout(OscarConfig(key_bits=16, value_bits=16), key.shape[-1], value.shape[-1], key.dtype)
    lengths = torch.full((key.shape[0],), key.shape[2], dtype=torch.int32, device=key.device)
    return KVView(layout, None, torch.zeros_like(lengths), None, None, (key, value), lengths, 0)


class Enabled:
    """A model whose ``generate`` uses an :class:`OscarCache`; :meth:`disable`, or leaving ``with``, undoes it."""

    def __init__(
        self, model: PreTrainedModel, oscar_config: OscarConfig | None, attention: str, fold_values: bool
    ) -> None:
        self.oscar_config = OscarConfig() if oscar_config is None else oscar_config
        cache = OscarCache(model.config, self.oscar_config)  # refuse an unsupported model before anything changes
        if attention == ATTENTION_NAME and cache.shares_keys and len(set(_devices(model))) > 1:
            raise NotImplementedError(
                f"attention '{ATTENTION_NAME}' for layers on several devices that share keys: use attention 'sdpa'"
            )
        self._whole, self.model = model, _writer(model)
        self._folded = self._fold(cache) if fold_values else None
        try:
            self._attentions = set_attention(model, attention)
        except Exception:
            self._unfold()
            raise
        self._generate: Callable[..., Any] = self.model.generate  # type: ignore[assignment]
        self.model.generate = self.generate  # type: ignore[assignment]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate`` with a fresh :class:`OscarCache`, unless the caller brings a cache or wants none."""
        given = args[1] if len(args) > 1 else kwargs.get("generation_config")
        wishes: dict[str, Any] = {}  # the call's own, or its configuration's, or the model's
        for name in ("use_cache", "cache_implementation", "is_assistant"):
            values = [kwargs.get(name)] + [getattr(x, name, None) for x in (given, self.model.generation_config)]
            wishes[name] = next((value for value in values if value is not None), None)
        own = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        unset = wishes["cache_implementation"] in (None, "hybrid")  # transformers takes "hybrid" for no wish
        if not own and unset and wishes["use_cache"] is not False:
            decoder = self.model.config.get_text_config(decoder=True)
            mask = None if decoder._attn_implementation == ATTENTION_NAME else kwargs.get("attention_mask")
            cache = OscarCache(self.model.config, self.oscar_config, attention_mask=mask)
            if wishes["is_assistant"]:  # whoever drafts will be rolled back
                cache.activate_past_recording()  # type: ignore[no-untyped-call]
            kwargs[CACHE_ARGUMENT] = cache
        return self._generate(*args, **kwargs)

    def _fold(self, cache: OscarCache) -> FoldedValues:
        """Rotate the values by the weights, and not in the cache."""
        if not self.oscar_config.rotate_values or self.oscar_config.value_bits == 16:
            raise ValueError("fold_values: this configuration rotates no values")
        if any("rotate_values" in own for own in self.oscar_config.layers.values()):
            raise ValueError("fold_values: this configuration has rotate_values for single layers")
        folded = FoldedValues(self.model, cache.packed_indices)
        self.oscar_config = replace(self.oscar_config, rotate_values=False)
        return folded

    def _unfold(self) -> None:
        if self._folded is not None:
            self._folded.undo()

    def disable(self) -> None:
        """Give the model back as it was."""
        if vars(self.model).get("generate") == self.generate:
            del self.model.generate
            self._whole.config._attn_implementation = self._attentions
            self._unfold()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.disable()


def enable(
    model: PreTrainedModel,
    oscar_config: OscarConfig | None = None,
    *,
    attention: str = ATTENTION_NAME,
    fold_values: bool = False,
) -> Enabled:
    """Make ``model.generate`` keep its KV cache in 2 bits.

    Args:
        model: A decoder model of transformers.
        oscar_config: What to quantize and how; the default is :class:`OscarConfig`.
        attention: "oscar" reads the packed bytes; any other attention of transformers reads a dequantized copy of one
            layer at a time.
        fold_values: Multiply the rotation of the values into the weights of ``v_proj`` and ``o_proj``, in place and
            until ``disable()``, so that it need not be computed. A cache made by hand then wants
            ``handle.oscar_config``.

    Returns:
        A handle whose ``disable()`` undoes it; it is also a context manager.

    Raises:
        NotImplementedError: The architecture is not supported, cannot run this attention, or has weights that the
            rotation cannot be folded into.
        ValueError: The model is enabled already, or no values are rotated that could be folded.

    Example:
        >>> import oscar_kv
        >>> handle = oscar_kv.enable(model)  # doctest: +SKIP
        >>> model.generate(**inputs, max_new_tokens=100)  # doctest: +SKIP
    """
    if "generate" in vars(_writer(model)):
        raise ValueError("model.generate is replaced already; disable() the first handle")
    register()
    return Enabled(model, oscar_config, attention, fold_values)


def _writer(model: PreTrainedModel) -> PreTrainedModel:
    """The part whose ``generate`` writes text: the thinker of an omni model, whose talker has another cache."""
    thinker: PreTrainedModel = getattr(model, "thinker", model)
    return thinker


def _devices(model: PreTrainedModel) -> list[Any]:
    """Where the parts of a model are that was loaded with a ``device_map``."""
    return list((getattr(model, "hf_device_map", None) or {}).values())
