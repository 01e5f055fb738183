"""``bench kernels``: what is measured, and the loop over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product

import torch

from oscar_kv import kernels
from oscar_kv.bench import append, candidate, decode, encode
from oscar_kv.bench.measurement import Measurement, Shape
from oscar_kv.bench.timing import ROUNDS, copy_bandwidth
from oscar_kv.config import BLOCK_TOKENS, OscarConfig

PRESETS = {
    "published": OscarConfig.paper(),
    "default": OscarConfig(),
    "quality": OscarConfig.quality(),
    "four-bit": OscarConfig.four_bit(),
}
IMPLS = {  # by op
    "decode": ("oscar", "sdpa-flash", "sdpa-cudnn"),
    "append": ("oscar", "oscar-staggered"),
    "encode": ("oscar", "copy", "copy-packed"),
}
ALL_IMPLS = tuple(dict.fromkeys(impl for names in IMPLS.values() for impl in names))
HEADS = (32, 8)  # of queries and of keys
BATCHES, CONTEXTS = (1, 8, 64), (1024, 2048, 4096, 8192, 16384, 65536)
_LARGE = (
    *((batch, context, *HEADS) for batch, context in ((8, 32768), (64, 4096), (128, 4096), (1, 131072), (1, 32768))),
    (1, 131072, 32, 32),
)
_PROMPT = (1, 32768, 0, 8)

Problem = tuple[str, Shape]  # op and shape


def problems(
    ops: Sequence[str] = tuple(IMPLS),
    batches: Sequence[int] = (),
    contexts: Sequence[int] = (),
    heads: Sequence[tuple[int, int]] = (),
    head_dim: int = 128,
) -> list[Problem]:
    """What to measure; every combination of batches, contexts and heads if any are given.

    Raises:
        ValueError: A context is no whole number of blocks, or the query heads are no multiple of the KV heads.
    """
    grid = list(product(batches or BATCHES, contexts or CONTEXTS, heads or (HEADS,)))
    chosen = [Shape(batch, context, *pair, head_dim) for batch, context, pair in grid]
    decoded = appended = encoded = chosen
    if not (batches or contexts or heads):
        appended = [Shape(*shape, head_dim) for shape in _LARGE]
        decoded = list(dict.fromkeys([*appended, *chosen]))
        encoded = [Shape(*_PROMPT, head_dim)]
    for shape in chosen:
        _check(shape)
    encoded = list(dict.fromkeys(replace(shape, q_heads=0) for shape in encoded))  # queries play no part
    by_op = {"decode": decoded, "append": appended, "encode": encoded}
    return [(op, shape) for op in ops for shape in by_op[op]]


def _check(shape: Shape) -> None:
    if shape.batch < 1 or shape.context < 1 or shape.context % BLOCK_TOKENS:
        raise ValueError(f"{shape.batch} x {shape.context} tokens: only whole blocks of {BLOCK_TOKENS} are measured")
    if shape.kv_heads < 1 or shape.q_heads < 1 or shape.q_heads % shape.kv_heads:
        raise ValueError(f"heads {shape.q_heads}/{shape.kv_heads}: query heads must be a multiple of the KV heads")
    OscarConfig().check_head_dim(shape.head_dim, shape.head_dim)


def measure(
    todo: Sequence[Problem],
    presets: Sequence[str] = tuple(PRESETS),
    impls: Sequence[str] = (),
    rounds: int = ROUNDS,
) -> Iterator[list[Measurement]]:
    """Measure one problem after the other on the current GPU.

    Args:
        todo: From :func:`problems`.
        presets: Names in PRESETS.
        impls: Names in ALL_IMPLS; none takes all of them.
        rounds: Times that each implementation is measured, in turn with the others.

    Returns:
        For each problem, when its turn comes, a measurement of every implementation and preset that ran.

    Raises:
        ValueError: An unknown name.
        NotImplementedError: The kernels do not run here.
    """
    for kind, given, names in (("preset", presets, tuple(PRESETS)), ("impl", impls, ALL_IMPLS)):
        if unknown := [name for name in given if name not in names]:
            raise ValueError(f"no {kind} {', '.join(unknown)}: choose from {', '.join(names)}")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if reason := kernels.missing(device):
        raise NotImplementedError(f"bench kernels needs a CUDA GPU and the kernels: {reason}")
    configs = {name: PRESETS[name] for name in presets}
    limit = copy_bandwidth(device)
    return (_measure(problem, configs, tuple(impls or ALL_IMPLS), rounds, limit, device) for problem in todo)


def _measure(
    problem: Problem,
    presets: dict[str, OscarConfig],
    impls: tuple[str, ...],
    rounds: int,
    limit: float,
    device: torch.device,
) -> list[Measurement]:
    op, shape = problem
    torch.cuda.empty_cache()  # what the problem before took
    module = {"decode": decode, "append": append, "encode": encode}[op]
    found = candidate.measure(module.candidates(shape, presets, impls, device), f"{op} {shape}", rounds)
    return [
        Measurement(
            op=op, impl=c.impl, preset=c.preset, form=c.form, **asdict(shape), **asdict(spread), bytes=c.bytes,
            copy_gbps=limit,
        )
        for c, spread in found
    ]  # fmt: skip
