"""``oscar-kv diagnose`` with images and sound: tiny saved models with random weights and real processors."""

import json
import wave

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)
from typer.testing import CliRunner

from models import byte_tokenizer
from oscar_kv.cli import app

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


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """64 tokens of an image of 112 x 112 pixels."""
    path, tokenizer = tmp_path_factory.mktemp("llava"), tokenizer_with("<image>")
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=112, patch_size=14
    )
    text = LlamaConfig(**_DECODER, vocab_size=len(tokenizer))
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token)
    ).save_pretrained(path)
    images = CLIPImageProcessor(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112})
    LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("<PLACE>", "<image>"),
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    """A model that sees, hears and speaks, with a processor of sound alone: 50 tokens of two seconds."""
    names = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|IMAGE|>", "<|VIDEO|>")
    path, tokenizer = tmp_path_factory.mktemp("omni"), tokenizer_with(*names)
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


def invoke(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["diagnose", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def picture(path, color):
    Image.new("RGB", (200, 150), color).save(path)
    return path


def test_images(llava, tmp_path):
    files = [picture(tmp_path / f"{color}.png", color) for color in ("red", "blue")]
    out = tmp_path / "out"
    options = ("--image", files[0], "--image", files[1], "--tokens", 300, "--out", out)
    invoke(llava, *options)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["input"]["source"] == "red.png, blue.png, Python's language reference"
    assert report["input"]["modalities"] == {"text": 384 - 128, "image": 128}
    assert (out / "modalities.png").read_bytes()[:4] == b"\x89PNG"
    assert "<th>image</th>" in (out / "report.html").read_text(encoding="utf-8")
    for layer in report["layers"]:
        assert layer["modalities"]["image"]["tokens"] == 128
    swapped = json.loads(invoke(llava, "--image", files[1], "--image", files[0], "--tokens", 300, "--json").stdout)
    assert swapped["layers"] != report["layers"]  # the pixels are looked at


def test_sound(omni, tmp_path):
    pytest.importorskip("soundfile", reason="soundfile, which transformers reads sound with, is not installed")
    path = tmp_path / "tone.wav"
    samples = (8000 * np.sin(np.arange(32000) * 0.1)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, len(samples), "NONE", ""))
        file.writeframes(samples.tobytes())
    report = json.loads(invoke(omni, "--audio", path, "--tokens", 300, "--json").stdout)
    assert report["input"]["modalities"]["audio"] == 50
    assert report["input"]["source"].startswith("tone.wav, ")
    assert report["model"]["class"] == "Qwen2_5OmniThinkerForConditionalGeneration"
    assert not any("not loaded from a checkpoint" in note for note in report["notes"])


def test_text_alone(llava):
    report = json.loads(invoke(llava, "--tokens", 300, "--json").stdout)
    assert report["input"]["modalities"] == {"text": 256}
    assert any("nothing is said about images" in note for note in report["notes"])


def test_what_cannot_be(llava, tmp_path):
    image = picture(tmp_path / "red.png", "red")
    assert "text alone" in invoke(llava, "--image", image, "--predictions", code=1).output
    (tmp_path / "no.png").write_text("not a picture")
    assert "oscar-kv: " in invoke(llava, "--image", tmp_path / "no.png", "--tokens", 300, code=1).output
