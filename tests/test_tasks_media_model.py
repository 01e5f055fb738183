"""The model type "oscar" of lmms-eval: what it takes, answers and refuses."""

import inspect
import string
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import media as families
import prompts
from oscar_kv import OscarConfig
from oscar_kv.evaluate import REFERENCE
from oscar_kv.multimodal import load_multimodal
from saved_media import RATE, TEMPLATE, picture, resampled, save_llava, says_only, sharpen, tone

pytest.importorskip("lmms_eval", reason="lmms-eval (extra media) is not installed")
soundfile = pytest.importorskip("soundfile", reason="soundfile (extra media) is not installed")

from oscar_kv.tasks.media import OscarLMM  # noqa: E402
from oscar_kv.tasks.media_parts import read  # noqa: E402


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return save_llava(tmp_path_factory.mktemp("llava"), 112)


@pytest.fixture(scope="module")
def llava(seeing):
    model, processor = load_multimodal(str(seeing))
    sharpen(model)
    model.generation_config = says_only(string.ascii_lowercase, processor.tokenizer)
    return model, processor


def test_samples_and_files_sound_the_same(tmp_path):
    """What lmms-eval's tasks give for a sound: samples, the bytes of a file, or its path."""
    from transformers.audio_utils import load_audio

    soundfile.write(tmp_path / "a.wav", tone(0, 1.0), RATE, subtype="FLOAT")
    given = [
        {"array": tone(0, 1.0), "sampling_rate": RATE},
        {"array": np.stack([tone(0, 1.0)] * 2), "sampling_rate": RATE},
        {"bytes": (tmp_path / "a.wav").read_bytes(), "path": None},
        {"bytes": None, "path": str(tmp_path / "a.wav")},
        str(tmp_path / "a.wav"),
    ]
    for medium in given:
        kind, source = read(medium)
        assert kind == "audio"
        np.testing.assert_allclose(
            load_audio(source, sampling_rate=16000), resampled(tmp_path / "a.wav"), atol=1e-6, rtol=0
        )


def test_other_media():
    assert read("clip.mp4") == ("video", "clip.mp4")
    assert read("page.png") == ("image", "page.png")
    for unknown in ("notes.txt", 7, {"a": 1}):
        with pytest.raises(NotImplementedError, match=r"neither an image"):
            read(unknown)


def answer(model, options, media=None, text="What?", **more):
    lm = OscarLMM(*model, **more)
    lm.task_dict = {"t": {"test": [media or [[picture("7")], None]]}}
    request = SimpleNamespace(args=(text, options, lambda item: item, 0, "t", "test"))
    return lm.generate_until([request])[0]


@pytest.mark.parametrize(
    ("make", "mark", "medium"),
    [
        (families.llava_next, prompts.IMAGE, picture("7")),
        (families.gemma3, prompts.START, picture("7")),
        (families.idefics3, prompts.IMAGE, picture("7")),
        (
            families.qwen2_audio,
            f"<|audio_bos|>{prompts.AUDIO}<|audio_eos|>",
            {"array": tone(1, 0.5), "sampling_rate": RATE},
        ),
    ],
)
def test_other_families_answer_as_with_the_16_bit_cache(make, mark, medium):
    torch.manual_seed(0)
    model, prompt = make()
    processor = inspect.getclosurevars(prompt).nonlocals["processor"]
    processor.chat_template = TEMPLATE.replace("<PLACE>", mark)
    text = "what is it? " * 30
    found = [
        answer((model.eval(), processor), {"max_new_tokens": 40}, [medium, medium], text, cache=cache)
        for cache in (REFERENCE, "unquantized", "default")
    ]
    assert found[0] == found[1] != found[2]


def test_answers_end_where_the_task_says(llava):
    whole = answer(llava, {"max_new_tokens": 60, "until": ["\n\n"]})
    stop = whole[20:23]
    assert answer(llava, {"max_new_tokens": 60, "until": stop}) == whole[: whole.index(stop)]
    assert len(whole) == 60


def test_what_cannot_be_is_refused(llava):
    with pytest.raises(NotImplementedError, match="greedy"):
        answer(llava, {"do_sample": True, "temperature": 0.7})
    with pytest.raises(NotImplementedError, match="the task has audio, which LlavaProcessor does not read"):
        answer(llava, {}, [{"array": tone(0), "sampling_rate": RATE}])
    with pytest.raises(NotImplementedError, match="batch_size 2"):
        OscarLMM(*llava, batch_size=2)
    with pytest.raises(ValueError, match="no cache best"):
        OscarLMM(*llava, cache="best")
    with pytest.raises(ValueError, match="needs its processor"):
        OscarLMM(llava[0])
    with pytest.raises(NotImplementedError, match="log-likelihoods"):
        OscarLMM(*llava).loglikelihood([])
    assert "generate" not in vars(llava[0])  # given back as it was


def test_lmms_eval_finds_the_model_by_its_name(seeing):
    from lmms_eval.models.registry_v2 import ModelRegistryV2

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["lmms_eval.models"].items()
    registry = ModelRegistryV2()
    registry.register_manifest(EntryPoint(name, value, "lmms_eval.models").load()())
    lm = registry.get_model_class("oscar").create_from_arg_string(
        f"pretrained={seeing},cache=quality", {"batch_size": 1, "device": "cpu"}
    )
    assert isinstance(lm, OscarLMM)
    assert lm.oscar_config == OscarConfig.quality()
