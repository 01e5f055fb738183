"""Times of GPU work: CUDA graphs that read fresh inputs, replayed in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

COLD = 4  # so many times the L2 cache is read before an input comes up again
ROUNDS = 30
_CALLS = 20  # that a graph holds at least: the launch of the graph itself must not count
_WARM_UP = 3  # replays
_COPY_BYTES = 2**28  # larger ones leave the multiprocessors for slower copy engines


@dataclass(frozen=True)
class Spread:
    """Percentiles of the time of one call, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Spread:
        levels = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
        return cls(*torch.tensor(samples_us, dtype=torch.float64).quantile(levels).tolist())


@dataclass(frozen=True)
class Graph:
    """A CUDA graph of some calls in a row, and how often it does what is measured."""

    graph: torch.cuda.CUDAGraph
    times: int


def input_sets(set_bytes: int, device: torch.device) -> int:
    """How many sets of inputs to rotate among, so that none of a set is left in the L2 cache when its turn comes."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-COLD * l2 // set_bytes))


def capture(calls: Sequence[Call], times: int = 1) -> Graph:
    """Put calls, one per set of inputs, into a graph, over and over if they are few.

    A call does what is measured so many times.

    The first call runs once before: it compiles what it needs, and fails here if it cannot run.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    repeats = -(-_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in repeats * list(calls):
            call()
    return Graph(graph, repeats * len(calls) * times)


def time_in_turn(graphs: Sequence[Graph], rounds: int = ROUNDS) -> list[Spread]:
    """Replay the graphs in turn, so that all of them meet the same clocks.

    Nothing waits for the CPU in between: the GPU has the next graph before it is done with the last.

    Args:
        graphs: From :func:`capture`.
        rounds: Replays of each that are timed.

    Returns:
        For each graph, the time of what is measured, once.
    """
    for graph in _WARM_UP * list(graphs):
        graph.graph.replay()
    marks = []
    for graph in rounds * list(graphs):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.graph.replay()
        stop.record()
        marks.append((start, stop))
    torch.cuda.synchronize()
    return [
        Spread.of([1e3 * start.elapsed_time(stop) / graph.times for start, stop in marks[i :: len(graphs)]])
        for i, graph in enumerate(graphs)
    ]


def copy_bandwidth(device: torch.device) -> float:
    """GB/s that a large copy on the device moves, bytes read plus bytes written: the memory limit in practice."""
    size = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (spread,) = time_in_turn([capture([lambda: target.copy_(source)])], rounds=10)
    return 2 * size / spread.median_us / 1e3
