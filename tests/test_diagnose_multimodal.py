"""Vision and omni models with random weights, built offline: per-modality statistics of the text decoder."""

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

from oscar_kv.diagnose import diagnose
from oscar_kv.diagnose.capture import capture
from oscar_kv.diagnose.figures import figures

LENGTH, COUNTED = 400, 384
AUDIO, IMAGE, VIDEO = 119, 120, 121
_DECODER = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_MROPE = {**_DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
    "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [0],
}  # fmt: skip
_PATCHES = {"grid": torch.tensor([[1, 16, 16]]), "dim": 3 * 2 * 14 * 14}  # 256 patches, merged into 64 tokens


def prompt(*spans):
    """Random text with placeholders (id, start, stop): int64 (1, n)."""
    ids = torch.randint(1, 100, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    for token, start, stop in spans:
        ids[0, start:stop] = token
    return ids


def patches():
    return torch.randn(256, _PATCHES["dim"])


def llava():
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=112, patch_size=14
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**_DECODER), image_token_index=IMAGE)
    inputs = {"input_ids": prompt((IMAGE, 10, 74)), "pixel_values": torch.randn(1, 3, 112, 112)}
    return LlavaForConditionalGeneration(config), inputs, {"text": 320, "image": 64}


def qwen_vl():
    config = Qwen2_5_VLConfig(
        text_config=_MROPE, vision_config=_VISION, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=122, vision_end_token_id=123,
    )  # fmt: skip
    ids = prompt((122, 9, 10), (IMAGE, 10, 74), (123, 74, 75), (122, 99, 100), (VIDEO, 100, 164), (123, 164, 165))
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        "pixel_values": patches(), "image_grid_thw": _PATCHES["grid"],
        "pixel_values_videos": patches(), "video_grid_thw": _PATCHES["grid"],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config), inputs, {"text": 256, "image": 64, "video": 64}


def omni():
    audio = {
        "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32,
        "output_dim": 64, "max_source_positions": 100, "n_window": 50,
    }  # fmt: skip
    config = Qwen2_5OmniThinkerConfig(
        text_config=_MROPE, vision_config=_VISION, audio_config=audio, audio_token_index=AUDIO,
        image_token_index=IMAGE, video_token_index=VIDEO, vision_start_token_id=122, vision_end_token_id=123,
        audio_start_token_id=124, audio_end_token_id=125,
    )  # fmt: skip
    ids = prompt((122, 9, 10), (IMAGE, 10, 74), (123, 74, 75), (124, 99, 100), (AUDIO, 100, 150), (125, 150, 151))
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "pixel_values": patches(), "image_grid_thw": _PATCHES["grid"],
        "input_features": torch.randn(1, 16, 200), "feature_attention_mask": torch.ones(1, 200, dtype=torch.long),
    }  # fmt: skip
    return Qwen2_5OmniThinkerForConditionalGeneration(config), inputs, {"text": 270, "image": 64, "audio": 50}


@pytest.fixture(scope="module", params=[llava, qwen_vl, omni])
def case(request):
    torch.manual_seed(0)
    model, inputs, counts = request.param()
    return model.eval(), inputs, counts


def attentions(model):
    return {name: getattr(model.config, name)._attn_implementation for name in model.config.sub_configs}


def test_each_modality_has_its_numbers(case):
    model, inputs, counts = case
    before = attentions(model)
    report = diagnose(model, inputs)
    assert attentions(model) == before
    assert report.numbers["input"]["modalities"] == counts
    assert any("not loaded from a checkpoint" in note for note in report.numbers["notes"])
    states = {}
    capture(model, inputs, lambda s: states.update({s.index: s}))
    assert list(states) == [0, 1]
    ids = inputs["input_ids"][0, :COUNTED]
    placeholders = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
    for layer in report.numbers["layers"]:
        norms = states[layer["layer"]].key[0, :, :COUNTED].double().square().sum((0, 2)).sqrt()
        masks = {name: ids == placeholder for name, placeholder in placeholders.items()}
        masks["text"] = ~(masks["image"] | masks["video"] | masks["audio"])
        assert layer["modalities"].keys() == counts.keys()
        for name, found in layer["modalities"].items():
            own = norms[masks[name]]
            assert found["tokens"] == len(own) == counts[name]
            assert found["key_max"] == pytest.approx(float(own.max()), rel=1e-3)
            ratio = float(own.quantile(0.5) / norms[masks["text"]].quantile(0.5))
            assert found["key_over_text"] == pytest.approx(ratio, rel=2e-2)
        for h, head in enumerate(layer["heads"]):
            own = states[layer["layer"]].key[0, h, :COUNTED].double().norm(dim=-1)
            middles = {name: float(own[masks[name]].quantile(0.5)) for name in counts}
            expected = {name: middle / middles["text"] for name, middle in middles.items()}
            for found in (head, layer["steps"]["rotation"]["heads"][h]):  # a rotation keeps norms
                assert found["key_over_text"] == pytest.approx(expected, rel=2e-2)
        for step in layer["steps"].values():
            assert step["modalities"]["key"].keys() == counts.keys()
            assert all(0 < error < 1 for error in step["modalities"]["key"].values())


def test_the_towers_are_not_watched(case):
    """Their attention has another head count than the decoder's, and would show as states or as an error."""
    model, inputs, _ = case
    heads = set()
    capture(model, inputs, lambda s: heads.add((s.query.shape[1], s.key.shape[1], s.key.shape[2])))
    assert heads == {(4, 2, LENGTH)}


def test_a_gap_between_modalities_is_reported():
    """The image embeddings are scaled up, through the projector's bias, until the keys of images stand out."""
    torch.manual_seed(0)
    model, inputs, _ = llava()
    model = model.eval()
    norm = model.model.language_model.layers[0].input_layernorm
    with torch.no_grad():  # without the RMS norm of the first layer, keys are as large as embeddings
        norm.weight.fill_(1.0)
    norm.forward = lambda hidden: hidden * norm.weight
    model.model.multi_modal_projector.register_forward_hook(lambda module, arguments, output: 40.0 * output)
    numbers = diagnose(model, inputs).numbers
    layer = numbers["layers"][0]
    assert layer["modalities"]["image"]["key_over_text"] > 2
    causes = {found["layer"]: found["causes"] for found in numbers["recommendation"]["layers"]}
    assert any(cause.startswith("image keys have") for cause in causes[0])


def test_each_modality_has_its_violin(case):
    model, inputs, counts = case
    figure, _ = figures(diagnose(model, inputs))["modalities"]
    for axes, side in zip(figure.axes, ("query", "key", "value"), strict=True):
        assert [label.get_text() for label in axes.get_xticklabels()] == list(counts)
        assert axes.get_ylabel() == f"{side} norm per head"


def test_predictions_need_text(case):
    model, inputs, _ = case
    with pytest.raises(ValueError, match="on text alone"):
        diagnose(model, inputs, predictions=True)
