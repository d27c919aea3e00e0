"""Times of GPU work by CUDA-graph replay, and what the memory of this GPU can do at best."""

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch

WARMUP, REPLAYS = 3, 15


def captured(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What ``launch`` launches, as a graph. It runs twice before it is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
        launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def graph_ms(launch: Callable[[], object]) -> float:
    """Median milliseconds of one replay of what ``launch`` launches."""
    graph = captured(launch)
    for _ in range(WARMUP):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def ceilings_gb_s() -> dict[str, float]:
    """Median GB/s of a stream that reads, and of one that reads and writes, 2 GB each."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    read, copy = graph_ms(lambda: source.sum()), graph_ms(lambda: torch.mul(source, 1.0, out=target))
    return {"read": source.nbytes / read / 1e6, "copy": 2 * source.nbytes / copy / 1e6}
