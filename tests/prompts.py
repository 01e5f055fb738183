"""Prompts of text, pictures, videos and sounds, as the models' own processors make them.

LLaVA, LLaVA-NeXT, Gemma 3, Idefics3 and Qwen2-Audio have whole processors. Those of the others need torchvision for
videos, which no test depends on: their images and sounds go through the real image processor and feature extractor,
placeholders are laid out here, and the patches of videos are random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from models import byte_tokenizer

Segments = Sequence[int | str]  # bytes of text, "image", "video" or "audio"
Prompt = Callable[[Segments, int], dict[str, Tensor]]
Maker = Callable[[np.random.Generator], dict[str, Tensor]]

IMAGE, VIDEO, AUDIO = "<image>", "<video>", "<|AUDIO|>"
START, END = "<start>", "<end>"
_IDEFICS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
MARKS = (IMAGE, VIDEO, AUDIO, START, END, *_IDEFICS, "<|audio_bos|>", "<|audio_eos|>")
SIDE, PATCH = 28, 7  # pixels of an image and of a patch: 16 patches


def tokenizer() -> Any:
    """One token per byte, and the marks."""
    made = byte_tokenizer()
    made.add_tokens(list(MARKS), special_tokens=True)
    made.padding_side = "left"
    for name, mark in (("boi", START), ("eoi", END), ("image", IMAGE)):
        setattr(made, f"{name}_token", mark)
        setattr(made, f"{name}_token_id", made.convert_tokens_to_ids(mark))
    return made


def token(mark: str) -> int:
    return int(tokenizer().convert_tokens_to_ids(mark))


def picture(generator: np.random.Generator, side: int = SIDE) -> Any:
    from PIL import Image

    return Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8))


def sound(generator: np.random.Generator) -> Any:
    """Half a second at 16 kHz: a tone and some noise."""
    time = np.arange(8000) / 16000
    tone = np.sin(2 * np.pi * generator.uniform(100, 4000) * time)
    return (tone + 0.1 * generator.standard_normal(8000)).astype("float32")


def words(generator: np.random.Generator, length: int) -> str:
    return "".join(chr(97 + x) for x in generator.integers(0, 26, length))


def by_processor(processor: Any, marks: dict[str, str], **options: Any) -> Prompt:
    """Prompts that the model's own processor makes of text, pictures and sounds."""

    def prompt(segments: Segments, seed: int) -> dict[str, Tensor]:
        generator = np.random.default_rng(seed)
        text = "".join(marks[x] if isinstance(x, str) else words(generator, x) for x in segments)
        media = dict(options)
        if pictures := [picture(generator) for x in segments if x == "image"]:
            media["images"] = [pictures]
        if sounds := [sound(generator) for x in segments if x == "audio"]:
            media |= {"audio": sounds, "sampling_rate": 16000}
        return dict(processor(text=[text], return_tensors="pt", **media))

    return prompt


def by_hand(spans: dict[str, tuple[list[int], Maker]], *, kinds: bool = False) -> Prompt:
    """Prompts of placeholders laid out here: of each medium its tokens, and what makes the model's inputs.

    ``kinds`` adds the kind of each token: 0 for text, 1 for an image, 2 for a video.
    """

    def prompt(segments: Segments, seed: int) -> dict[str, Tensor]:
        generator, ids = np.random.default_rng(seed), list[int]()
        media: dict[str, list[Tensor]] = {}
        for segment in segments:
            if isinstance(segment, int):
                ids += generator.integers(97, 123, segment).tolist()
                continue
            placeholders, make = spans[segment]
            ids += placeholders
            for name, x in make(generator).items():
                media.setdefault(name, []).append(x)
        out = {name: torch.cat(xs) for name, xs in media.items()}
        row = torch.tensor([ids])
        if kinds:
            out["mm_token_type_ids"] = (row == token(IMAGE)).int() + 2 * (row == token(VIDEO)).int()
        return {"input_ids": row, "attention_mask": torch.ones_like(row), **out}

    return prompt


def image_patches(patch: int) -> Maker:
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=1, max_pixels=(4 * patch) ** 2)

    def make(generator: np.random.Generator) -> dict[str, Tensor]:
        return dict(processor(images=[picture(generator, 4 * patch)], return_tensors="pt"))

    return make


def video_patches(patch: int, **more: Tensor) -> Maker:
    def make(generator: np.random.Generator) -> dict[str, Tensor]:
        pixels = generator.standard_normal((2 * 16, 3 * 2 * patch**2)).astype("float32")
        return {"pixel_values_videos": torch.from_numpy(pixels), "video_grid_thw": torch.tensor([[2, 4, 4]]), **more}

    return make


def mel(name: str = "feature_attention_mask") -> Maker:
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)

    def make(generator: np.random.Generator) -> dict[str, Tensor]:
        out = extractor(sound(generator), sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
        return {"input_features": out["input_features"], name: out["attention_mask"]}

    return make


def framed(mark: str, count: int, start: str = START, end: str = END) -> list[int]:
    return [token(start), *[token(mark)] * count, token(end)]
