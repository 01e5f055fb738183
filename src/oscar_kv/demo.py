"""The demo: one prompt with the 16-bit and the packed cache side by side; what differs, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from oscar_kv.cache import OscarCache
from oscar_kv.config import OscarConfig
from oscar_kv.evaluate import REFERENCE, Fidelity, compare
from oscar_kv.footprint import bits_per_element, bytes_at, memory_bytes
from oscar_kv.integrations.transformers import CACHE_ARGUMENT, Enabled
from oscar_kv.plots import LABELS

LONG = 32 * 1024  # tokens for which bytes are computed


@dataclass(frozen=True)
class Demo:
    """What the demo found. Dictionaries go by cache, "16-bit" first.

    Args:
        continuations: Generated tokens, int64 (new tokens,).
        steps: Fidelity along the 16-bit continuation, one token per pass after an exact prefill.
        text: Fidelity along the prompt, in chunks of 128 that attend to the packed history.
        bits: Bits per element after the continuation.
        footprints: By length, by cache: bytes by component.
    """

    continuations: dict[str, Tensor]
    steps: dict[str, Fidelity]
    text: dict[str, Fidelity]
    bits: dict[str, float]
    footprints: dict[str, dict[str, dict[str, int]]]


def packed_name(config: OscarConfig) -> str:
    """INT2, or INT3/2 for 3-bit keys and 2-bit values."""
    bits = [config.key_bits] if config.key_bits == config.value_bits else [config.key_bits, config.value_bits]
    return "INT" + "/".join(str(n) for n in bits)


def run(enabled: Enabled, ids: Tensor, new_tokens: int, progress: Progress) -> Demo:
    """Continue a prompt greedily with both caches, and compare their predictions under teacher forcing.

    Args:
        enabled: The model and what to quantize, from :func:`oscar_kv.enable`.
        ids: int64 (1, n) prompt.
        new_tokens: Tokens to generate.
        progress: Shows how far it is.
    """
    model, config = enabled.model, enabled.oscar_config
    name, n = packed_name(config), ids.shape[1]

    def packed_cache() -> OscarCache:
        return OscarCache(model.config, config, max_length=n + new_tokens)

    caches: dict[str, Cache] = {REFERENCE: DynamicCache(config=model.config), name: packed_cache()}
    tasks = {cache: progress.add_task(f"{cache}: continue the prompt", total=new_tokens) for cache in caches}
    along_steps = progress.add_task("both: step by step along the 16-bit continuation", total=n + new_tokens)
    along_text = progress.add_task("both: chunk by chunk along the prompt", total=n)
    continuations = {
        cache: _continue(enabled, ids, caches[cache], new_tokens, _Ticker(progress, tasks[cache])) for cache in caches
    }
    whole = torch.cat((ids, continuations[REFERENCE].unsqueeze(0)), dim=1)
    packed = {name: packed_cache}
    steps = compare(
        model, whole, packed, chunk=1, start=n, prefill=n, progress=lambda count: progress.advance(along_steps, count)
    )
    text = compare(model, ids, packed, progress=lambda count: progress.advance(along_text, count))
    lengths = {
        f"{caches[name].get_seq_length():,} tokens": {key: memory_bytes(cache) for key, cache in caches.items()},
        f"{LONG:,} tokens\n(computed)": {key: bytes_at(cache, LONG) for key, cache in caches.items()},
    }
    return Demo(continuations, steps, text, {key: bits_per_element(cache) for key, cache in caches.items()}, lengths)


class _Ticker(BaseStreamer):
    """Moves a progress bar at each generated token."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task, self.prompt = progress, task, True

    def put(self, value: Tensor) -> None:
        if not self.prompt:  # generate() hands over the prompt first
            self.progress.advance(self.task, value.numel())
        self.prompt = False

    def end(self) -> None:
        pass


def _continue(enabled: Enabled, ids: Tensor, cache: Cache, count: int, streamer: BaseStreamer) -> Tensor:
    """Exactly ``count`` greedy tokens after a prompt (1, n): int64 (count,)."""
    output = enabled.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        streamer=streamer,
        **{CACHE_ARGUMENT: cache},
    )
    new: Tensor = output[0, ids.shape[1] :]
    return new


def show(demo: Demo, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print continuations, fidelity and bytes."""
    reference, packed = demo.continuations.values()
    differs = (reference != packed).nonzero()
    same = int(differs[0]) if len(differs) else len(packed)
    for name, tokens in demo.continuations.items():
        start, rest = (str(tokenizer.decode(part)) for part in (tokens[:same], tokens[same:]))
        console.print(Panel(Text.assemble(start, (rest, "bold yellow")), title=f"{name} continues", title_align="left"))
    console.print(f"The first {same} of {len(packed)} tokens are the same.\n")
    console.print(_fidelity_table(demo), "", _bytes_table(demo))


def _fidelity_table(demo: Demo) -> Table:
    table = Table(title="Predictions against those with the 16-bit cache (teacher forcing)", title_justify="left")
    for column in ("", "tokens", "mean KL (nats)", "p99 KL", "perplexity", "same first choice"):
        table.add_column(column, justify="right" if column else "left")
    for label, results in (("prompt", demo.text), ("continuation", demo.steps)):
        found = list(results.values())[-1]
        change = f"{found.perplexity_change:+.1f} %"
        kl = f"{found.kl:.4f}", f"{found.kl_p99:.4f}"
        table.add_row(label, str(len(found.kl_per_token)), *kl, change, f"{100 * found.top1:.1f} %")
    return table


def _bytes_table(demo: Demo) -> Group:
    table = Table(title="Bytes held", title_justify="left")
    table.add_column("")
    columns = [parts for caches in demo.footprints.values() for parts in caches.values()]
    for length, caches in demo.footprints.items():
        for name in caches:
            table.add_column(f"{name}\n{length}", justify="right")
    components = [key for key in dict.fromkeys(key for parts in columns for key in parts) if key != "total"]
    for component in components:
        if any(parts.get(component) for parts in columns):
            cells = [f"{parts[component]:,}" if parts.get(component) else "" for parts in columns]
            table.add_row(LABELS.get(component, component), *cells)
    table.add_section()
    table.add_row("total", *[f"{parts['total']:,}" for parts in columns], style="bold")
    factors = []
    for caches in demo.footprints.values():
        reference, packed = (parts["total"] for parts in caches.values())
        factors += ["", f"{reference / packed:.2f} x"]
    table.add_row("smaller by", *factors)
    name, bits = list(demo.bits.items())[-1]
    note = f"{name} takes {bits:.2f} bits per element now, everything held included. The bytes at {LONG:,} tokens are "
    return Group(table, note + "computed: packed blocks grow with the tokens, tail and sinks stay.")
