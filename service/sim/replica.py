"""A simulated replica: continuous batches that take the time of a step model.

Between two changes of the batch all steps are alike, so they are taken in one event: a stretch of equal
steps. A request that arrives during a stretch cuts it short at the end of the step that is running.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

from service.routing.cost import StepModel
from service.routing.policy import PREFILL_WINDOW, Ask


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way. Times in seconds; first_s and end_s: its first and last token."""

    index: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    slo: Any
    prefill_left: int = 0
    first_s: float = inf
    end_s: float = inf
    ask: Ask | None = None
    replica: str | None = None
    router: int = 0
    retried: bool = False
    spilled: bool = False
    prefix: int | None = None

    @property
    def tpot_ms(self) -> float:
        return 1000 * (self.end_s - self.first_s) / max(1, self.output_tokens - 1)

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.first_s - self.arrived_s)


@dataclass(slots=True)
class _Stretch:
    start_s: float
    step_s: float
    count: int
    prefill_tokens: int
    admits: list[Job] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return self.start_s + self.count * self.step_s


@dataclass(eq=False)
class SimReplica:
    """One replica. ``plan`` starts the next stretch, ``settle`` ends the one that is due."""

    name: str
    pool: int
    order: int
    model: StepModel
    rows_limit: int
    chunk_tokens: int
    memory_tokens: float
    started_s: float
    slow_down: float = 1.0
    ready: bool = False
    draining: bool = False
    ended_s: float | None = None
    version: int = 0
    decoding: int = 0
    steps: int = 0
    prefill_per_step: float = 0.0
    held_tokens: int = 0
    waiting: deque[Job] = field(default_factory=deque)
    _ends: list[tuple[int, int, Job]] = field(default_factory=list)
    _stretch: _Stretch | None = None

    @property
    def rows(self) -> int:
        """Requests in flight."""
        return self.decoding + len(self.waiting)

    @property
    def backlog_tokens(self) -> int:
        return sum(job.prefill_left for job in self.waiting)

    @property
    def jobs(self) -> list[Job]:
        return [*self.waiting, *(job for _, _, job in self._ends)]

    def take(self, job: Job, now_s: float) -> float | None:
        """Accept a request. Returns when the stretch that it cuts short, or starts, ends."""
        job.prefill_left = job.prompt_tokens
        self.waiting.append(job)
        self.held_tokens += job.prompt_tokens + job.output_tokens
        stretch = self._stretch
        if stretch is None:
            return self.plan(now_s)
        steps = max(1, ceil((now_s - stretch.start_s) / stretch.step_s - 1e-9))
        if steps >= stretch.count:
            return None
        stretch.count = steps
        self.version += 1
        return stretch.end_s

    def plan(self, now_s: float) -> float | None:
        """Start the next stretch. Returns when it ends; None without work."""
        self._stretch = None
        if not (self.waiting or self.decoding):
            return None
        until_end = self._ends[0][0] - self.steps if self._ends else 1 << 60
        count, taken = until_end, 0
        admits: list[Job] = []
        if self.waiting and self.decoding < self.rows_limit:
            left = self.waiting[0].prefill_left
            if left > self.chunk_tokens:
                count, taken = min(until_end, (left - 1) // self.chunk_tokens), self.chunk_tokens
            else:
                count = 1
                taken, admits = self._admit()
        step_ms = self.model.step_ms(self.decoding + len(admits), taken) * self.slow_down
        self._stretch = _Stretch(now_s, step_ms / 1000, count, taken, admits)
        self.version += 1
        return self._stretch.end_s

    def _admit(self) -> tuple[int, list[Job]]:
        """The prompts that the next step completes, and what it takes in."""
        room = self.chunk_tokens
        admits: list[Job] = []
        for job in self.waiting:
            if not room or self.decoding + len(admits) >= self.rows_limit:
                break
            part = min(room, job.prefill_left)
            room -= part
            if part == job.prefill_left:
                admits.append(job)
        return self.chunk_tokens - room, admits

    def settle(self) -> tuple[list[Job], list[Job]]:
        """End the stretch. Returns the jobs that got their first token, and those that got their last."""
        stretch = self._stretch
        assert stretch is not None
        self._stretch = None
        end_s = stretch.end_s
        self.steps += stretch.count
        fade = (1 - 1 / PREFILL_WINDOW) ** stretch.count
        self.prefill_per_step = (
            stretch.prefill_tokens + (self.prefill_per_step - stretch.prefill_tokens) * fade
        )
        taken = stretch.prefill_tokens * stretch.count
        for job in self.waiting:
            if not taken:
                break
            part = min(taken, job.prefill_left)
            job.prefill_left -= part
            taken -= part
        for job in stretch.admits:
            self.waiting.popleft()
            job.first_s = end_s
            self.decoding += 1
            heapq.heappush(self._ends, (self.steps - 1 + job.output_tokens, job.index, job))
        finished = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, _, job = heapq.heappop(self._ends)
            job.end_s = end_s
            self.decoding -= 1
            self.held_tokens -= job.prompt_tokens + job.output_tokens
            finished.append(job)
        return stretch.admits, finished

    def kill(self) -> list[Job]:
        """Lose everything. Returns the jobs that it had."""
        lost = self.jobs
        self.waiting.clear()
        self._ends.clear()
        self._stretch, self.decoding, self.held_tokens = None, 0, 0
        self.version += 1
        return lost
