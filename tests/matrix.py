"""Writes ``docs/models.md`` from the tables of families: ``PYTHONPATH=src:tests python tests/matrix.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from families import DENSE, MEDIA, NOTHING, REFUSED, TEXT, Family, text_config
from oscar_kv import OscarCache

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

INTRODUCTION = """# Models

Written by `tests/matrix.py` from the table of families that the tests run; do not edit it by hand. The models are tiny
and random, of transformers' own classes. "yes" says that the named test ran with the family; an empty field, that the
family has no such thing. What is not here was not tested.

"""
TEXT_TESTS = {
    "decode": ("test_decode", "prefill and decode, two blocks packed on the way: the logits of transformers' cache"),
    "padding": ("test_padding", "a left-padded batch, read packed and read dense"),
    "rows": ("test_rows_alone", "a row of a batch has the 2-bit codes that it has alone"),
    "2 bits": ("test_few_bits", "2 bits read packed and read dense agree; 8 bits are close to 16"),
    "beams": ("test_beams", "beam search"),
    "turns": ("test_second_turn", "a further turn on the same cache"),
    "roll back": ("test_roll_back", "tokens are taken back across a block boundary"),
}
FOLD = {
    "folded": (
        "test_folded_is_online",
        "the rotation of values is folded into the weights (`fold_values=True`), which come back bit for bit",
    ),
    "refused": ("test_what_cannot_be_folded", "it cannot be, for the reason given below; online it works"),
}
MEDIA_TESTS = {
    "images": ("test_media", "one image, and three in a row"),
    "video": ("test_media", "a video"),
    "audio": ("test_media", "a sound"),
    "interleaved": ("test_media", "all of them between pieces of text"),
    "rows": ("test_padded_rows_alone", "a row of a left-padded batch has the 2-bit codes that it has alone"),
    "2 bits": ("test_few_bits", "2 bits read packed and read dense agree; 8 bits are close to 16"),
    "turns": ("test_second_turn", "a further turn on the same cache, with text"),
    "media later": (
        "test_more_media_in_the_second_turn",
        "with new images or sounds; empty where transformers takes none, whatever the cache",
    ),
    "towers": ("test_towers_are_left_alone", "every module outside the decoder puts out the same bits"),
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"


def tests(file: str, columns: dict[str, tuple[str, str]]) -> str:
    """What a column's "yes" means, and which test says so."""
    return "".join(f"* {name}: {what} (`tests/{file}::{test}`)\n" for name, (test, what) in columns.items())


def yes(given: object) -> str:
    return "yes" if given else ""


def parts(family: Family) -> list[str]:
    """What a family has: window, linear, softcap, sinks, shared keys."""
    config = text_config(family)
    layers = OscarCache(config).layers
    with torch.device("meta"):
        names = [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]
    return [
        yes(any(isinstance(x, DynamicSlidingWindowLayer) for x in layers)),
        yes(any(isinstance(x, LinearAttentionLayer) for x in layers)),
        yes(getattr(config, "attn_logit_softcapping", None)),
        yes(any("sink" in name for name in names)),
        yes(getattr(config, "num_kv_shared_layers", 0)),
    ]


def text_row(family: Family) -> list[str]:
    tested = ["yes"] * (len(TEXT_TESTS) - 1) + ["yes" if family.rolls_back else "refused"]
    fold = "yes" if family.unfoldable is None else f"refused ({REASONS.index(family.unfoldable) + 1})"
    return [family.models, *parts(family), *tested, fold]


REASONS = sorted({family.unfoldable for family in TEXT.values() if family.unfoldable})


def media_row(family: Any) -> list[str]:
    takes = [yes(x in family.media) for x in ("image", "video", "audio")]
    tested = ["" if name == "media later" and not family.later else "yes" for name in list(MEDIA_TESTS)[3:]]
    return [family.models, *takes, *tested, family.processor]


def page() -> str:
    special = ["sliding", "linear", "soft cap", "sinks", "shared keys"]
    return "".join(
        (
            INTRODUCTION,
            "## Text\n\n",
            "Layers that keep their whole history are packed. Sliding and chunked windows and the states of linear\n"
            "attentions, convolutions and Mamba stay as they are; layers that read another layer's keys hold none.\n\n",
            tests("test_families.py", TEXT_TESTS),
            tests("test_fold.py", FOLD),
            "\n",
            table(["models", *special, *TEXT_TESTS, "folded"], map(text_row, TEXT.values())),
            "Why values are not folded:\n\n",
            "".join(f"{i}. {reason}\n" for i, reason in enumerate(REASONS, 1)) + "\n",
            "## Images, video and sound\n\n",
            tests("test_media.py", MEDIA_TESTS),
            "\n",
            "Processor: what makes the inputs. Where it is the parts, placeholders are laid out by hand and patches\n"
            "of videos are random, since whole processors with videos need torchvision.\n\n",
            table(["models", *MEDIA_TESTS, "processor"], map(media_row, MEDIA.values())),
            "Layers that attend to images alone (Mllama) are left alone "
            "(`tests/test_media.py::test_cross_attention_is_left_alone`),\nand so is the talker of an omni model "
            "(`tests/test_media.py::test_the_talker_is_left_alone`).\n\n",
            '## Packed, but not with attention "oscar"\n\n',
            "The history is dequantized for the model's own attention: "
            '`enable(model, attention="eager")` or `"sdpa"`\n'
            "(`tests/test_refused.py::test_read_by_its_own_attention_alone`).\n\n",
            table(["models", "the error says"], ((family.models, reason) for family, reason in DENSE.values())),
            "## Nothing to pack\n\n",
            "No layer keeps its whole history; a warning says so, and nothing changes "
            "(`tests/test_refused.py::test_nothing_to_pack`).\n\n",
            "".join(f"* {family.models}\n" for family in NOTHING.values()) + "\n",
            "## Refused\n\n",
            "`OscarCache(config)` and `enable(model)` raise `NotImplementedError` "
            "(`tests/test_refused.py::test_refused`).\n\n",
            table(["models", "reason"], REFUSED.values()),
            "MiniMax-01 takes no cache but its own, and says so "
            "(`tests/test_refused.py::test_a_model_with_a_cache_class_of_its_own`).\n",
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
