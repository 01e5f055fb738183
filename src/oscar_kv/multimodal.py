"""Models that see or hear, and their input: images and sounds, then a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForMultimodalLM,
    AutoProcessor,
    PreTrainedModel,
    ProcessorMixin,
)

from oscar_kv.loading import DEMO_MODEL, check_dtype, first_tokens, to_device


def is_text_model(name: str) -> bool:
    """Whether a model loads without a processor; many that see or hear need theirs even for text."""
    return name == DEMO_MODEL or type(AutoConfig.from_pretrained(name)) in MODEL_FOR_CAUSAL_LM_MAPPING


def load_multimodal(name: str, dtype: str = "auto") -> tuple[PreTrainedModel, ProcessorMixin]:
    """A multi-modal model, on the GPU where there is one, and its processor.

    Of a model that also speaks, only the part that reads text, images and sound: its "thinker".

    Args:
        name: A folder or an id on the hub.
        dtype: See :func:`oscar_kv.loading.load`.
    """
    check_dtype(dtype)
    processor = AutoProcessor.from_pretrained(name)
    whole = AutoModelForMultimodalLM.from_pretrained(name, dtype=dtype)
    model: PreTrainedModel = getattr(whole, "thinker", whole)
    model.config.name_or_path = whole.config.name_or_path
    return to_device(model), processor


def message(
    processor: ProcessorMixin, dtype: Any, text: str, tokens: int, images: Sequence[Path], sounds: Sequence[Path]
) -> dict[str, Any]:
    """One message of a user, in the processor's chat template: the images, the sounds and the start of a text.

    Args:
        processor: The model's; it reads the files.
        dtype: The model's, for pixels and sound.
        text: The text.
        tokens: How many tokens of it.
        images: Files of images.
        sounds: Files of sound.

    Returns:
        Arguments of the model's forward.

    Raises:
        ValueError: The text is shorter, or the processor has no chat template.
        ImportError: A package that the processor needs is missing.
    """
    ids = first_tokens(processor.tokenizer, text, tokens)
    return prepare(
        processor,
        dtype,
        [
            *({"type": "image", "path": str(path)} for path in images),
            *({"type": "audio", "path": str(path)} for path in sounds),
            {"type": "text", "text": processor.tokenizer.decode(ids[0], skip_special_tokens=True)},
        ],
    )


def prepare(
    processor: ProcessorMixin, dtype: Any, content: Sequence[dict[str, Any]], answer: bool = False
) -> dict[str, Any]:
    """One message of a user, in the processor's chat template.

    Args:
        processor: The model's; it reads the files.
        dtype: The model's, for pixels and sound.
        content: Images, sounds, videos and texts, in transformers' format of messages.
        answer: Whether the model is to answer; else the message stays open.

    Returns:
        Arguments of the model's forward.

    Raises:
        ValueError: The processor has no chat template.
        ImportError: A package that the processor needs is missing.
    """
    turns: list[dict[str, Any]] = [{"role": "user", "content": list(content)}]
    inputs: Any = processor.apply_chat_template(
        turns, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=answer
    )
    return dict(inputs.to(dtype))
