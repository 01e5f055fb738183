"""Tiny vision, audio and omni models with random weights, each with what makes its prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from prompts import (
    AUDIO,
    END,
    IMAGE,
    PATCH,
    SIDE,
    START,
    VIDEO,
    Prompt,
    Segments,
    by_hand,
    by_processor,
    framed,
    image_patches,
    mel,
    picture,
    token,
    tokenizer,
    video_patches,
)

VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": SIDE, "patch_size": PATCH},
}
CROP: dict[str, Any] = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
DECODER: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2, "bos_token_id": None},
    **{"eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_VISION: dict[str, Any] = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64},
    **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}


def _config(name: str, **fields: Any) -> Any:
    return getattr(transformers, name)(**fields)


def _llama(**more: Any) -> Any:
    return _config("LlamaConfig", **{**DECODER, "head_dim": 32, "vocab_size": len(tokenizer()), **more})


def _clip() -> Any:
    return _config("CLIPVisionConfig", **{**VISION, "num_hidden_layers": 2})


def llava() -> tuple[Any, Prompt]:
    config = _config("LlavaConfig", text_config=_llama(), vision_config=_clip(), image_token_index=token(IMAGE))
    images = transformers.LlavaImageProcessorPil(**CROP)
    processor = transformers.LlavaProcessor(
        images, tokenizer(), patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return transformers.LlavaForConditionalGeneration(config), by_processor(processor, {"image": IMAGE})


def llava_next() -> tuple[Any, Prompt]:
    pinpoints = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]
    config = _config(
        "LlavaNextConfig", text_config=_llama(), image_token_index=token(IMAGE), image_grid_pinpoints=pinpoints,
        vision_config=_clip(),
    )  # fmt: skip
    images = transformers.LlavaNextImageProcessorPil(**CROP, image_grid_pinpoints=pinpoints)
    processor = transformers.LlavaNextProcessor(
        images, tokenizer(), patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return transformers.LlavaNextForConditionalGeneration(config), by_processor(processor, {"image": IMAGE})


def gemma3() -> tuple[Any, Prompt]:
    text = _config(
        "Gemma3TextConfig", **{**DECODER, "head_dim": 32, "vocab_size": len(tokenizer()), "num_hidden_layers": 3},
        layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=48,
        query_pre_attn_scalar=32,
    )  # fmt: skip
    config = _config(
        "Gemma3Config", text_config=text, vision_config=_config("SiglipVisionConfig", **VISION), mm_tokens_per_image=4,
        boi_token_index=token(START), eoi_token_index=token(END), image_token_index=token(IMAGE),
        tie_word_embeddings=False,
    )  # fmt: skip
    images = transformers.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor = transformers.Gemma3Processor(images, tokenizer(), image_seq_length=4)
    return transformers.Gemma3ForConditionalGeneration(config), by_processor(processor, {"image": START})


def idefics3(name: str = "Idefics3") -> tuple[Any, Prompt]:
    config = _config(
        f"{name}Config", text_config=_llama(), vision_config=_config(f"{name}VisionConfig", **VISION), scale_factor=2,
        image_token_id=token(IMAGE), tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    size = {"longest_edge": SIDE}
    images = getattr(transformers, f"{name}ImageProcessorPil")(size=size, max_image_size=size)
    if name == "Idefics3":
        processor = transformers.Idefics3Processor(images, tokenizer(), image_seq_len=4)
        return model, by_processor(processor, {"image": IMAGE})

    def make(generator: np.random.Generator) -> dict[str, Tensor]:  # (1, images, 3, height, width)
        return {"pixel_values": images(images=[[picture(generator)]], return_tensors="pt")["pixel_values"][0]}

    prompt = by_hand({"image": (framed(IMAGE, 4), make)})

    def batched(segments: Segments, seed: int) -> dict[str, Tensor]:
        made = prompt(segments, seed)
        return made | {name: x.unsqueeze(0) for name, x in made.items() if name == "pixel_values"}

    return model, batched


def internvl() -> tuple[Any, Prompt]:
    text = _config("Qwen2Config", **{**DECODER, "vocab_size": len(tokenizer())})
    vision = {**VISION, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
    config = _config(
        "InternVLConfig", text_config=text, vision_config=_config("InternVLVisionConfig", **vision),
        image_token_id=token(IMAGE), image_seq_length=4, tie_word_embeddings=False,
    )  # fmt: skip
    images = transformers.GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, crop_to_patches=False)

    def make(generator: np.random.Generator) -> dict[str, Tensor]:
        return {"pixel_values": images(images=[picture(generator)], return_tensors="pt")["pixel_values"]}

    return transformers.InternVLForConditionalGeneration(config), by_hand({"image": (framed(IMAGE, 4), make)})


def _vision_marks() -> dict[str, int]:
    return {"vision_start_token_id": token(START), "vision_end_token_id": token(END)}


def qwen2_5_vl() -> tuple[Any, Prompt]:
    text = _config("Qwen2_5_VLTextConfig", **{**DECODER, "vocab_size": len(tokenizer()), "rope_parameters": ROPE})
    config = _config(
        "Qwen2_5_VLConfig", text_config=text, image_token_id=token(IMAGE), video_token_id=token(VIDEO),
        vision_config={**QWEN_VISION, "window_size": 56, "fullatt_block_indexes": [0]}, **_vision_marks(),
    )  # fmt: skip
    spans = {
        "image": (framed(IMAGE, 4), image_patches(14)),
        "video": (framed(VIDEO, 8), video_patches(14, second_per_grid_ts=torch.ones(1))),
    }
    return transformers.Qwen2_5_VLForConditionalGeneration(config), by_hand(spans, kinds=True)


def qwen3_vl() -> tuple[Any, Prompt]:
    rope = {**ROPE, "mrope_interleaved": True}
    text = {**DECODER, "head_dim": 16, "vocab_size": len(tokenizer()), "rope_parameters": rope}
    vision = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = _config(
        "Qwen3VLConfig", text_config=text, vision_config=vision, image_token_id=token(IMAGE),
        video_token_id=token(VIDEO), **_vision_marks(),
    )  # fmt: skip
    frame = framed(VIDEO, 4)  # each frame of a video stands by itself
    spans = {"image": (framed(IMAGE, 4), image_patches(14)), "video": (frame + frame, video_patches(14))}
    return transformers.Qwen3VLForConditionalGeneration(config), by_hand(spans, kinds=True)


def qwen2_5_omni() -> tuple[Any, Prompt]:
    text = {**DECODER, "vocab_size": len(tokenizer()), "rope_parameters": ROPE}
    audio = {
        **{"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32},
        **{"output_dim": 64, "max_source_positions": 100, "n_window": 50},
    }
    config = _config(
        "Qwen2_5OmniThinkerConfig", text_config=text, audio_config=audio,
        vision_config={**QWEN_VISION, "window_size": 56, "fullatt_block_indexes": [0]},
        audio_token_index=token(AUDIO), image_token_index=token(IMAGE), video_token_index=token(VIDEO),
        audio_start_token_id=token("<|audio_bos|>"), audio_end_token_id=token("<|audio_eos|>"), **_vision_marks(),
    )  # fmt: skip
    spans = {
        "image": (framed(IMAGE, 4), image_patches(14)),
        "video": (framed(VIDEO, 8), video_patches(14, video_second_per_grid=torch.ones(1))),
        "audio": (framed(AUDIO, 12, "<|audio_bos|>", "<|audio_eos|>"), mel()),
    }
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config), by_hand(spans)


def qwen3_omni() -> tuple[Any, Prompt]:
    rope = {**ROPE, "mrope_interleaved": True}
    text = {**DECODER, "vocab_size": len(tokenizer()), "rope_parameters": rope, "num_experts": 2}
    text |= {"num_experts_per_tok": 1, "moe_intermediate_size": 48, "head_dim": 16}
    audio = {
        **{"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32},
        **{"output_dim": 64, "max_source_positions": 100, "n_window": 50, "n_window_infer": 100},
        **{"downsample_hidden_size": 8, "conv_chunksize": 100},
    }
    vision = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = _config(
        "Qwen3OmniMoeThinkerConfig", text_config=text, audio_config=audio, vision_config=vision,
        audio_token_id=token(AUDIO), image_token_id=token(IMAGE), video_token_id=token(VIDEO),
        audio_start_token_id=token("<|audio_bos|>"), audio_end_token_id=token("<|audio_eos|>"), **_vision_marks(),
    )  # fmt: skip
    spans = {
        "image": (framed(IMAGE, 4), image_patches(14)),
        "video": (framed(VIDEO, 8), video_patches(14, video_second_per_grid=torch.ones(1))),
        "audio": (framed(AUDIO, 7, "<|audio_bos|>", "<|audio_eos|>"), mel()),
    }
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config), by_hand(spans)


def qwen2_audio() -> tuple[Any, Prompt]:
    text = _config("Qwen2Config", **{**DECODER, "vocab_size": len(tokenizer())})
    audio = {
        **{"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32},
        **{"max_source_positions": 50},
    }
    config = _config("Qwen2AudioConfig", text_config=text, audio_config=audio, audio_token_index=token(AUDIO))
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    processor = transformers.Qwen2AudioProcessor(extractor, tokenizer())
    mark = f"<|audio_bos|>{AUDIO}<|audio_eos|>"
    return transformers.Qwen2AudioForConditionalGeneration(config), by_processor(processor, {"audio": mark})


def voxtral() -> tuple[Any, Prompt]:
    audio = {**VISION, "num_mel_bins": 16, "max_source_positions": 50, "intermediate_size": 64}
    audio = {name: x for name, x in audio.items() if name not in ("image_size", "patch_size")}
    config = _config("VoxtralConfig", text_config=_llama(), audio_config=audio, audio_token_id=token(AUDIO))
    make = mel()
    spans = {"audio": ([token(AUDIO)] * 25, lambda g: {"input_features": make(g)["input_features"]})}
    return transformers.VoxtralForConditionalGeneration(config), by_hand(spans)


def smolvlm() -> tuple[Any, Prompt]:
    return idefics3("SmolVLM")


def whole_omni() -> tuple[Any, Prompt]:
    """Qwen2.5-Omni with its talker and its vocoder; no speaker is loaded, so that it only writes."""
    thinker, prompt = qwen2_5_omni()
    marks = ("text_start", "text_end", "text_pad", "codec_start", "codec_end", "codec_pad", "codec_mask")
    talker = {
        **DECODER, "num_hidden_layers": 1, "embedding_size": 64, "head_dim": 16, "vocab_size": len(tokenizer()),
        "rope_parameters": ROPE, "audio_start_token_id": 3, "audio_end_token_id": 4, **_vision_marks(),
        **{f"tts_{name}_token_id": i for i, name in enumerate(marks)},
    }  # fmt: skip
    vocoder = {
        "dit_config": {
            **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32, "ff_mult": 1},
            **{"enc_channels": [16] * 3, "enc_kernel_sizes": [3, 3, 1], "enc_dilations": [1, 2, 1], "enc_dim": 16},
            **{"enc_attention_channels": 8, "enc_res2net_scale": 2, "enc_se_channels": 8, "emb_dim": 32},
            "enc_emb_dim": 16,
        },
        "bigvgan_config": {"upsample_initial_channel": 64},
    }
    config = _config(
        "Qwen2_5OmniConfig", thinker_config=thinker.config.to_dict(), talker_config=talker, token2wav_config=vocoder
    )
    model = transformers.Qwen2_5OmniForConditionalGeneration(config)
    model.speaker_map = {"Chelsie": {}}
    return model, prompt
