"""``oscar-kv diagnose`` with images and sound: tiny saved models with random weights and real processors."""

import json
import wave

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from oscar_kv.cli import app
from saved_media import save_llava, save_omni


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """64 tokens of an image."""
    return save_llava(tmp_path_factory.mktemp("llava"), 112)


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    return save_omni(tmp_path_factory.mktemp("omni"))


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
