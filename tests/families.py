"""The model families that are tested, one row each: ``test_families.py`` runs them, ``docs/models.md`` lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

import media
import oscar_kv
from models import COMMON, VOCAB, WINDOW
from prompts import Prompt

_SLIDING: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": WINDOW,
}
_LINEAR: dict[str, Any] = {
    **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4},
}
_EXPERTS: dict[str, Any] = {
    **{"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48},
    **{"shared_expert_intermediate_size": 48, "norm_topk_prob": True},
}
_MAMBA: dict[str, Any] = {
    **{"num_hidden_layers": 3, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 32, "mamba_d_conv": 4, "mamba_expand": 2},
}
_SHARED: dict[str, Any] = {  # the last two layers read the keys and values of the first two
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW},
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
}
_DIM_16 = {"head_dim": 16}  # 64 / 4, where a configuration has no head_dim of its own

# why values cannot be folded, as the errors say it
GATE = "an output gate stands between attention and the output projection"
V_NORM = "a norm stands between v_proj and attention"
FUSED = "no attention module has a v_proj and o_proj for it alone; they are fused or shared"


@dataclass(frozen=True)
class Family:
    """What is tested of one family.

    Args:
        models: What the documentation calls it.
        config: Name of the configuration's class in transformers.
        fields: Of that configuration, on top of the tiny ones that all share.
        unfoldable: Why its value rotation cannot be folded into the weights; None where it can.
        rolls_back: Whether tokens can be taken back; the state of a linear attention knows no earlier one.
        without: Of the tiny fields what the class does not take.
    """

    models: str
    config: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    unfoldable: str | None = None
    rolls_back: bool = True
    without: tuple[str, ...] = ()


TEXT: dict[str, Family] = {
    "llama": Family("Llama 2, 3", "LlamaConfig"),
    "qwen2": Family("Qwen2, Qwen2.5", "Qwen2Config", _DIM_16),
    "qwen3": Family("Qwen3", "Qwen3Config", _DIM_16),
    "mistral": Family("Mistral (no sliding window)", "MistralConfig", {"sliding_window": None}),
    "ministral": Family("Ministral", "MinistralConfig", _SLIDING),
    "phi3": Family("Phi-3, Phi-4", "Phi3Config", _DIM_16, FUSED),
    "gemma": Family("Gemma", "GemmaConfig"),
    "gemma2": Family(
        "Gemma 2", "Gemma2Config", {**_SLIDING, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 5.0}
    ),
    "gemma3": Family("Gemma 3 (text)", "Gemma3TextConfig", {**_SLIDING, "query_pre_attn_scalar": 32}),
    "gemma3n": Family(
        "Gemma 3n (text)", "Gemma3nTextConfig",
        {**_SHARED, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [96] * 4}, V_NORM,
    ),
    "gemma4": Family("Gemma 4 (text)", "Gemma4TextConfig", {**_SHARED, "global_head_dim": 64}, V_NORM),
    "gpt_oss": Family("gpt-oss", "GptOssConfig", {**_SLIDING, **_EXPERTS}),
    "cohere": Family("Command R", "CohereConfig", _DIM_16),
    "cohere2": Family("Command A, Command R7B", "Cohere2Config", _SLIDING),
    "olmo2": Family("OLMo 2", "Olmo2Config", _DIM_16),
    "olmo3": Family("OLMo 3", "Olmo3Config", {**_SLIDING, **_DIM_16}),
    "granite": Family("Granite 3", "GraniteConfig", _DIM_16),
    "smollm3": Family("SmolLM3", "SmolLM3Config"),
    "starcoder2": Family("StarCoder2", "Starcoder2Config", {**_DIM_16, "sliding_window": None}),
    "exaone4": Family("EXAONE 4", "Exaone4Config", {**_SLIDING, **_DIM_16}),
    "glm4": Family("GLM-4", "Glm4Config"),
    "phi": Family("Phi-1.5, Phi-2", "PhiConfig", _DIM_16),
    "gpt2": Family("GPT-2", "GPT2Config", {}, FUSED),
    "gpt_neox": Family("Pythia, GPT-NeoX", "GPTNeoXConfig", _DIM_16, FUSED),
    "opt": Family("OPT", "OPTConfig", {"word_embed_proj_dim": 64, "ffn_dim": 96}),
    "mixtral": Family("Mixtral", "MixtralConfig", _EXPERTS),
    "qwen3_moe": Family("Qwen3 MoE", "Qwen3MoeConfig", _EXPERTS),
    "mimo": Family("MiMo-V2-Flash (keys wider than values)", "MiMoV2FlashConfig"),
    "llama4": Family(
        "Llama 4 (text)", "Llama4TextConfig",
        {
            **_EXPERTS, "num_hidden_layers": 3, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0, 1],
            "layer_types": ["chunked_attention", "full_attention", "full_attention"],
            "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1,
        },
    ),
    "qwen3_next": Family(
        "Qwen3-Next", "Qwen3NextConfig", {**_LINEAR, **_EXPERTS, "partial_rotary_factor": 0.5}, GATE, rolls_back=False
    ),
    "qwen3_5": Family("Qwen3.5, Qwen3.6 (text)", "Qwen3_5TextConfig", _LINEAR, GATE, rolls_back=False),
    "lfm2": Family("LFM2", "Lfm2Config", {**_LINEAR, "layer_types": ["conv", "full_attention", "full_attention"]}),
    "jamba": Family(
        "Jamba", "JambaConfig",
        {
            **_EXPERTS, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
            "mamba_dt_rank": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
        },
        rolls_back=False,
    ),
    "bamba": Family("Bamba", "BambaConfig", {**_MAMBA, **_DIM_16, "attn_layer_indices": [1, 2]}, rolls_back=False),
    "granite4": Family(
        "Granite 4", "GraniteMoeHybridConfig",
        {**_EXPERTS, **_MAMBA, **_DIM_16, "layer_types": ["mamba", "attention", "attention"],
         "shared_intermediate_size": 48},
        rolls_back=False,
    ),
    "nemotron_h": Family(
        "Nemotron-H, Nemotron 3", "NemotronHConfig",
        {
            **_EXPERTS, "num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "moe", "attention"],
            "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 32,
            "n_routed_experts": 2, "moe_shared_expert_intermediate_size": 48, "moe_latent_size": None,
        },
        rolls_back=False,
    ),
    "falcon_h1": Family(
        "Falcon-H1", "FalconH1Config", {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128}, rolls_back=False
    ),
    "zamba2": Family(
        "Zamba2", "Zamba2Config",
        {
            "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "n_mamba_heads": 4,
            "mamba_headdim": 32, "mamba_d_state": 16, "mamba_ngroups": 1, "chunk_size": 32, "num_mem_blocks": 1,
            "num_key_value_heads": 4,
        },
        FUSED,
        rolls_back=False,
    ),
}  # fmt: skip


_OWN_CODE = "cannot run attention 'oscar'"
DENSE: dict[str, tuple[Family, str]] = {  # packed, but read with another attention than "oscar": what the error says
    "bloom": (Family("BLOOM", "BloomConfig", {"n_layer": 2, "n_head": 4}), _OWN_CODE),
    "falcon": (
        Family(
            "Falcon", "FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2},
            without=("head_dim", "num_key_value_heads"),
        ),
        _OWN_CODE,
    ),
    "doge": (Family("Doge", "DogeConfig"), "looks into its cache by itself"),
    "diffllama": (Family("DiffLlama", "DiffLlamaConfig", _DIM_16), "attends twice to a layer's keys"),
}  # fmt: skip
NOTHING: dict[str, Family] = {  # models without a layer that keeps its whole history
    "sliding": Family("Mistral 7B v0.1 (sliding windows alone)", "MistralConfig", {"sliding_window": WINDOW}),
    "mamba": Family("Mamba", "MambaConfig", {"state_size": 8}),
    "recurrent_gemma": Family(
        "RecurrentGemma", "RecurrentGemmaConfig",
        {
            "num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"], "lru_width": 64,
            "attention_window_size": WINDOW,
        },
    ),
}  # fmt: skip

_MLA = "multi-head latent attention"
_CROSS = "encoder-decoder"
REFUSED: dict[str, tuple[str, str]] = {  # configuration: models, and part of the reason
    "DeepseekV2Config": ("DeepSeek V2", _MLA),
    "DeepseekV3Config": ("DeepSeek V3, R1", _MLA),
    "DeepseekV32Config": ("DeepSeek V3.2", _MLA),
    "DeepseekV4Config": ("DeepSeek V4", "cache of their own"),
    "MiniCPM3Config": ("MiniCPM3", _MLA),
    "KimiLinearConfig": ("Kimi Linear", _MLA),
    "LongcatFlashConfig": ("LongCat-Flash", _MLA),
    "Glm4MoeLiteConfig": ("GLM-4.7-Flash", _MLA),
    "GlmMoeDsaConfig": ("GLM-5", _MLA),
    "Mistral4Config": ("Mistral 4", _MLA),
    "WhisperConfig": ("Whisper", _CROSS),
    "T5Config": ("T5", _CROSS),
    "BartConfig": ("BART", _CROSS),
    "MoonshineConfig": ("Moonshine", _CROSS),
}


def config_class(name: str) -> Any:
    """A configuration of transformers by name; skips the test where this version has none."""
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return kind


def text_config(family: Family) -> Any:
    """The tiny configuration of a text family."""
    fields = {key: value for key, value in {**COMMON, **family.fields}.items() if key not in family.without}
    return config_class(family.config)(**fields)


@cache
def text_model(name: str) -> PreTrainedModel:
    """The random model of a text family, in eager attention; shared by the tests, which give it back as it was."""
    family = next(table[name] for table in (TEXT, {k: x for k, (x, _) in DENSE.items()}, NOTHING) if name in table)
    oscar_kv.register()
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(text_config(family), attn_implementation="eager")
    return model.eval()


@dataclass(frozen=True)
class MediaFamily:
    """What is tested of one family that sees or hears.

    Args:
        models: What the documentation calls it.
        build: Makes the model, and what makes its prompts.
        media: Of "image", "video" and "audio" what it takes.
        processor: What makes the inputs of the tests.
        later: Whether transformers takes further media in a later turn, with any cache.
    """

    models: str
    build: Callable[[], tuple[PreTrainedModel, Prompt]]
    media: tuple[str, ...]
    processor: str
    later: bool = True


WHOLE = "its own"
PARTS = "its parts"
MEDIA: dict[str, MediaFamily] = {
    "llava": MediaFamily("LLaVA 1.5", media.llava, ("image",), WHOLE),
    "llava_next": MediaFamily("LLaVA-NeXT", media.llava_next, ("image",), WHOLE),
    "gemma3": MediaFamily("Gemma 3 (vision)", media.gemma3, ("image",), WHOLE),
    "idefics3": MediaFamily("Idefics3", media.idefics3, ("image",), WHOLE),
    "smolvlm": MediaFamily("SmolVLM", media.smolvlm, ("image",), PARTS),
    "internvl": MediaFamily("InternVL 3", media.internvl, ("image",), PARTS),
    "qwen2_5_vl": MediaFamily("Qwen2.5-VL", media.qwen2_5_vl, ("image", "video"), PARTS, later=False),
    "qwen3_vl": MediaFamily("Qwen3-VL", media.qwen3_vl, ("image", "video"), PARTS, later=False),
    "qwen2_5_omni": MediaFamily("Qwen2.5-Omni (thinker)", media.qwen2_5_omni, ("image", "video", "audio"), PARTS),
    "qwen3_omni": MediaFamily("Qwen3-Omni (thinker)", media.qwen3_omni, ("image", "video", "audio"), PARTS),
    "qwen2_audio": MediaFamily("Qwen2-Audio", media.qwen2_audio, ("audio",), WHOLE),
    "voxtral": MediaFamily("Voxtral", media.voxtral, ("audio",), PARTS),
}


@cache
def media_model(name: str) -> tuple[PreTrainedModel, Prompt]:
    """The random model of such a family, and its prompts; shared by the tests, which give it back as it was."""
    torch.manual_seed(3)
    oscar_kv.register()
    try:
        model, prompt = MEDIA[name].build()
    except (AttributeError, ImportError) as missing:  # an older transformers has no such class, or wants torchvision
        pytest.skip(f"transformers {transformers.__version__}: {str(missing).strip().splitlines()[0]}")
    decoder = model.config.get_text_config(decoder=True)
    inside = {id(x) for part in model.modules() if getattr(part, "config", None) is decoder for x in part.parameters()}
    for x in model.parameters():  # as wide as the decoder's: what is seen and heard shows in the tokens
        if id(x) not in inside and x.ndim > 1:
            torch.nn.init.normal_(x, std=0.2)
    return model.eval(), prompt
