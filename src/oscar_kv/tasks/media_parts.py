"""Images, videos and sounds as lmms-eval's tasks give them, and as messages of transformers take them."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import soundfile
from PIL import Image

# what a processor reads each kind with
READERS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}


def flat(media: Any) -> Iterable[Any]:
    """The media of an item, which some tasks put into lists of lists."""
    if not isinstance(media, list | tuple):
        return [] if media is None else [media]
    return [part for medium in media for part in flat(medium)]


def read(medium: Any) -> tuple[str, Any]:
    """The kind of a medium, and what transformers takes for it.

    Args:
        medium: An image, the path of a file, or a sound: samples (samples,) or (channels, samples) with their rate, or
            the bytes or the path of a file.
    """
    if isinstance(medium, Image.Image):
        return "image", medium
    if isinstance(medium, str | Path):
        kind = (mimetypes.guess_type(str(medium))[0] or "").split("/")[0]
        if kind not in READERS:
            raise NotImplementedError(f"{medium} is neither an image nor a video nor a sound")
        return kind, str(medium)
    if isinstance(medium, Mapping) and ("array" in medium or medium.get("bytes") is not None):
        return "audio", "data:;base64," + base64.b64encode(_sound(medium)).decode()
    if isinstance(medium, Mapping) and medium.get("path") is not None:
        return "audio", medium["path"]
    raise NotImplementedError(f"the task has {type(medium).__name__}, which is neither an image, a video nor a sound")


def _sound(medium: Mapping[str, Any]) -> bytes:
    """A sound as a file; the processor resamples it."""
    if "array" not in medium:
        return bytes(medium["bytes"])
    file = BytesIO()
    soundfile.write(file, medium["array"].T, medium["sampling_rate"], format="WAV", subtype="FLOAT")
    return file.getvalue()
