"""The model type "oscar" of lmms-eval: a model that sees or hears, and generates with a packed cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from transformers import PreTrainedModel, ProcessorMixin, StoppingCriteriaList, StopStringCriteria

from oscar_kv.cache_layer import ATTENTION_NAME
from oscar_kv.config import OscarConfig
from oscar_kv.multimodal import load_multimodal, prepare
from oscar_kv.tasks.caches import cache_config, enabled
from oscar_kv.tasks.media_parts import READERS, flat, read

_NEW_TOKENS = 1024  # of an answer, where the task sets no limit
_FILLED_IN = "\n\n"  # the stop string that lmms-eval gives to tasks that name none


class OscarLMM(lmms):  # type: ignore[misc]
    """A multi-modal model of transformers with a packed cache, for tasks that generate, greedily and item by item.

    The images, videos and sounds of an item come before its text, in the model's chat template. The prompt attends to
    exact keys, each generated token to packed history.

    Args:
        pretrained: A model, a folder or an id on the hub.
        processor: The model's; None loads it, too.
        cache: As for :class:`oscar_kv.tasks.model.OscarLM`.
        attention: "oscar" reads the packed bytes; any other attention of transformers a dequantized copy.
        dtype: Of the model, if it is loaded here: auto, bfloat16, float16 or float32.
        batch_size: 1.
        device: Where to; by default the GPU where there is one.

    Raises:
        ValueError: There is no such cache.
        NotImplementedError: The model is not supported, or a batch is asked for.

    Example:
        >>> from lmms_eval.evaluator import simple_evaluate
        >>> simple_evaluate("oscar", "pretrained=...,cache=quality", tasks=["ocrbench"])  # doctest: +SKIP
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        processor: ProcessorMixin | None = None,
        cache: str | OscarConfig = "default",
        attention: str = ATTENTION_NAME,
        dtype: str = "auto",
        batch_size: int | str = 1,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.oscar_config = cache_config(cache)
        if int(batch_size) != 1:
            raise NotImplementedError(f"batch_size {batch_size}: items with images or sound are run one by one")
        if isinstance(pretrained, str):
            self.model, self.processor = load_multimodal(pretrained, dtype)
        elif processor is None:
            raise ValueError("a model that is loaded already needs its processor")
        else:
            self.model, self.processor = pretrained, processor
        if device is not None:
            self.model.to(device)  # type: ignore[arg-type]
        self._enabled = partial(enabled, self.model, self.oscar_config, attention)
        with self._enabled():  # an unsupported model is refused before any data is loaded
            pass

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The answers, by request."""
        answers = []
        with self._enabled():
            for request in requests:
                text, options, media_of, item, task, split = request.args
                answers.append(self._answer(text, media_of(self.task_dict[task][split][item]), dict(options or {})))
        return answers

    def _answer(self, text: str, media: Any, options: dict[str, Any]) -> str:
        if options.get("do_sample") or options.get("temperature") or (options.get("num_beams") or 1) > 1:
            raise NotImplementedError("the task samples or searches with beams: answers are greedy")
        content = [self._part(medium) for medium in flat(media)]
        made = prepare(self.processor, self.model.dtype, [*content, {"type": "text", "text": text}], answer=True)
        inputs = {name: x.to(self.model.device) if isinstance(x, torch.Tensor) else x for name, x in made.items()}
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop != _FILLED_IN]
        criteria = StoppingCriteriaList([StopStringCriteria(self.processor.tokenizer, stops)] if stops else [])
        out = self.model.generate(  # type: ignore[operator]
            **inputs,
            do_sample=False,
            max_new_tokens=options.get("max_new_tokens", _NEW_TOKENS),
            stopping_criteria=criteria,
        )
        new = out[0, inputs["input_ids"].shape[1] :]
        answer: str = self.processor.tokenizer.decode(new, skip_special_tokens=True)
        for stop in stops:
            answer = answer.split(stop)[0]
        return answer

    def _part(self, medium: Any) -> dict[str, Any]:
        """A part of a message, refused where the model has nothing to read it with."""
        kind, source = read(medium)
        if not any(getattr(self.processor, reader, None) for reader in READERS[kind]):
            raise NotImplementedError(f"the task has {kind}, which {type(self.processor).__name__} does not read")
        return {"type": kind, kind: source}

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("log-likelihoods of tasks with images or sound: only tasks that generate are run")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("tasks of several rounds: only tasks that generate once are run")
