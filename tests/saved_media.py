"""Tiny models that see or hear, with random weights and real processors, in folders."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from models import byte_tokenizer

RATE, SECONDS = 8000, 15.0  # 375 tokens, of sounds that are resampled to 16 kHz

TEMPLATE = (
    "{% for turn in messages %}{% for part in turn['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<PLACE>{% endif %}{% endfor %}{% endfor %}"
)
_DECODER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.1,
}  # fmt: skip


def tokenizer_with(*special):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def save_llava(path, side):
    """A model that sees, (side / 14) ** 2 tokens of an image."""
    tokenizer = tokenizer_with("<image>")
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=side, patch_size=14
    )
    text = LlamaConfig(**_DECODER, vocab_size=len(tokenizer))
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token)
    ).save_pretrained(path)
    images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("<PLACE>", "<image>"),
    ).save_pretrained(path)  # fmt: skip
    return path


def save_omni(path):
    """A model that sees, hears and speaks, with a processor of sound alone: 25 tokens of a second."""
    names = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|IMAGE|>", "<|VIDEO|>")
    tokenizer = tokenizer_with(*names)
    audio, start, end, image, video = (tokenizer.convert_tokens_to_ids(name) for name in names)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    thinker = {
        "text_config": {**_DECODER, "vocab_size": len(tokenizer), "rope_parameters": rope},
        "vision_config": {
            "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        },
        "audio_config": {
            "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32,
            "output_dim": 64, "max_source_positions": 1500, "n_window": 50,
        },
        "audio_token_index": audio, "audio_start_token_id": start, "audio_end_token_id": end,
        "image_token_index": image, "video_token_index": video, "vision_start_token_id": 1, "vision_end_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
    Qwen2_5OmniForConditionalGeneration(config).save_pretrained(path)
    torch.save({}, path / "spk_dict.pt")  # its voices
    template = TEMPLATE.replace("<PLACE>", "".join((names[1], names[0], names[2])))
    extractor = WhisperFeatureExtractor(feature_size=16)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=template).save_pretrained(path)
    return path


def says_only(characters, tokenizer):
    """The configuration of a model that may write these characters alone, for answers that metrics can read."""
    allowed = {tokenizer.convert_tokens_to_ids(tokenizer.tokenize(character)[0]) for character in characters}
    return GenerationConfig(suppress_tokens=[i for i in range(len(tokenizer)) if i not in allowed])


def sharpen(model):
    """Weights with which what is seen, heard and quantized changes answers."""
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            for weight in layer.parameters():
                weight.mul_(4 if weight.ndim > 1 else 1)


def picture(text):
    """An image of a word."""
    image = Image.new("RGB", (300, 220), "white")
    ImageDraw.Draw(image).text((30, 90), text, fill="black", font_size=60)
    return image


def tone(seed, seconds=SECONDS):
    """A tone and some noise."""
    time = np.arange(int(RATE * seconds)) / RATE
    noise = np.random.default_rng(seed).standard_normal(len(time))
    return (0.5 * np.sin(2 * np.pi * 200 * (seed + 1) * time) + 0.02 * noise).astype("float32")


def resampled(path):
    """The samples of a file at 16 kHz."""
    import soundfile
    import soxr

    samples, rate = soundfile.read(path, dtype="float32")
    return soxr.resample(samples, rate, 16000, quality="HQ")
