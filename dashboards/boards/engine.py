"""What the engines and their machines do."""

from typing import Any

from dashboards.panels import Query, board, line_panel, stat_panel
from dashboards.promql import either, highest, over, quantile, rate, total
from service.metrics.log import ASIDE
from service.metrics.replicas import BUILD_INFO
from service.metrics.requests import DURATION, ITL
from service.metrics.routing import READY
from service.metrics.scheduler import CACHE_USAGE, PREEMPTIONS, PROMPT_TOKENS, WAITING
from service.metrics.steps import STEP_SECONDS, STEPS

RAY_METRICS = {
    "cpu": "ray_node_cpu_utilization",
    "memory_used": "ray_node_mem_used",
    "memory_total": "ray_node_mem_total",
    "gpu": "ray_node_gpus_utilization",
    "gpu_memory_mib": "ray_node_gram_used",
    "actors": "ray_actors",
}
"""Metrics that Ray itself exports; those of GPUs only where a node has one."""
RAY_LABELS = ("instance", "GpuIndex", "State", "replica")
"""Ray's own labels by which a panel may split its series."""


def _node(name: str, *by: str) -> str:
    return f"max by ({', '.join(('instance', *by))}) ({RAY_METRICS[name]})"


def build() -> dict[str, Any]:
    """The board of engines and infrastructure."""
    step_time = over(rate(STEP_SECONDS), rate(STEPS))
    stats = [
        stat_panel(
            "Step time",
            "Mean time of an engine step. If it grows at the same batch, see the node below: another "
            "process, heat or memory.",
            "s",
            Query(step_time),
        ),
        stat_panel(
            "Steps a second",
            "Steps of all replicas of a pool. If it is 0 while requests run, the engine stalls: restart the "
            "replica.",
            "suffix:/s",
            Query(rate(STEPS)),
        ),
        stat_panel(
            "Duration p95",
            "Time from arrival in the engine to the last token that 95 % of sequences stay under. If it "
            "grows while TPOT holds, answers are longer.",
            "s",
            Query(quantile(0.95, DURATION)),
        ),
        stat_panel(
            "Time in mixed steps",
            "Share of step time in steps that also took in prompt tokens. If it is large, prefill slows "
            "decode: lower max_num_batched_tokens or add replicas.",
            "percentunit",
            Query(over(rate(STEP_SECONDS, mode="mixed"), rate(STEP_SECONDS))),
        ),
        stat_panel(
            "Replicas aside",
            "Replicas that decode as stock vLLM although their pool has a merge interval; 0 for a pool "
            "without one. If it is above 0, their log says why in one warning.",
            "none",
            Query(either(total(ASIDE), f"0 * {highest(READY)}")),
            steps=[(1, "red")],
        ),
        stat_panel(
            "Builds",
            "Replicas by the versions of DeltaLog and vLLM that they run. If there are two for long, a "
            "roll-out hangs.",
            "none",
            Query(total(BUILD_INFO, *BUILD_INFO.labels), "{{pool}} {{version}}, vLLM {{vllm}}"),
        ),
    ]
    panels = [
        line_panel(
            "Step time by batch",
            "Mean time of a step that only decodes, by the upper edge of its batch. If a curve leaves its "
            "level, the machine or the kernels changed, not the load.",
            "s",
            Query(
                over(
                    rate(STEP_SECONDS, "batch", mode="decode"),
                    rate(STEPS, "batch", mode="decode"),
                ),
                "{{pool}} to {{batch}} rows",
            ),
        ),
        line_panel(
            "Step time by mode",
            "Mean time of steps that only decode, and of those that also take in prompt tokens (mixed). If "
            "mixed grows, chunks of prompts are too large for the ITL that you want.",
            "s",
            Query(over(rate(STEP_SECONDS, "mode"), rate(STEPS, "mode")), "{{pool}} {{mode}}"),
        ),
        line_panel(
            "Step time by replica",
            "Mean time of a step in each replica. If one leaves the others at the same batch, its node or "
            "its accelerator is slow: see the nodes below, or end that replica and another is started.",
            "s",
            Query(over(rate(STEP_SECONDS, "replica"), rate(STEPS, "replica")), "{{pool}} {{replica}}"),
        ),
        line_panel(
            "Steps by mode",
            "Steps a second that only decode, and that also take in prompt tokens. If mixed ones prevail, "
            "the load is prompts: capacity follows prefill, not the log.",
            "suffix:/s",
            Query(rate(STEPS, "mode"), "{{pool}} {{mode}}"),
            stacked=True,
        ),
        line_panel(
            "Duration of a sequence",
            "Time from arrival in the engine to the last token. If p99 leaves p50 behind, some sequences "
            "are preempted or very long.",
            "s",
            *(Query(quantile(share / 100, DURATION), f"{{{{pool}}}} p{share}") for share in (50, 95, 99)),
        ),
        line_panel(
            "Inter-token latency",
            "Gap between outputs of a sequence. If p99 jumps, prompts of others hold decode up: see mixed "
            "steps. A simulated engine gives none.",
            "s",
            *(Query(quantile(share / 100, ITL), f"{{{{pool}}}} p{share}") for share in (50, 95, 99)),
        ),
        line_panel(
            "Prompt tokens",
            "Prompt tokens a second that prefill computed, and that the prefix cache had. If requests share "
            "their beginnings and little is cached, the cache is too small or prefix affinity off. A "
            "simulated engine gives none.",
            "suffix:tok/s",
            Query(rate(PROMPT_TOKENS, "source"), "{{pool}} {{source}}"),
            stacked=True,
        ),
        line_panel(
            "Blocks in use",
            "Share of vLLM's blocks for state and key-value cache that are taken, in the fullest replica. If "
            "it nears 100 %, sequences wait or are preempted: give the replica more memory or fewer rows.",
            "percentunit",
            Query(highest(CACHE_USAGE)),
        ),
        line_panel(
            "Waiting in the engine",
            "Sequences that an engine has taken and that have no row or no memory yet. If some wait for "
            "long, max_num_seqs or the memory is below what max_concurrent_requests lets in.",
            "none",
            Query(total(WAITING)),
        ),
        line_panel(
            "Preemptions",
            "Sequences a second that lose their memory to others and begin again with their prompt. If there "
            "are any for long, lower max_concurrent_requests: each costs a prefill.",
            "suffix:/s",
            Query(rate(PREEMPTIONS)),
        ),
        line_panel(
            "Node utilisation",
            "Processor time in use on each node, and of each GPU where there are any. If processors are "
            "full on a GPU node, steps wait for Python: give the replica more cores.",
            "percent",
            Query(_node("cpu"), "{{instance}} CPU"),
            Query(_node("gpu", "GpuIndex"), "{{instance}} GPU {{GpuIndex}}"),
        ),
        line_panel(
            "Node memory",
            "Memory in use on each node, what it has, and of each GPU where there are any. If it nears the "
            "line, Ray kills workers: lower kv_cache_memory_bytes.",
            "bytes",
            Query(_node("memory_used"), "{{instance}}"),
            Query(_node("memory_total"), "{{instance}} total"),
            Query(f"{_node('gpu_memory_mib', 'GpuIndex')} * {2**20}", "{{instance}} GPU {{GpuIndex}}"),
        ),
        line_panel(
            "Ray's actors",
            "Actors of the cluster by what Ray says of them: replicas, ingresses and Serve's own. If one is "
            "restarting or pending for long, a node or its memory is missing: see the nodes above.",
            "none",
            Query(f'sum by (State) ({RAY_METRICS["actors"]}{{Source="gcs"}})', "{{State}}"),
        ),
    ]
    return board(
        "deltalog-engine",
        "DeltaLog / Engine and infrastructure",
        "Steps, latencies and machines.",
        stats,
        panels,
    )
