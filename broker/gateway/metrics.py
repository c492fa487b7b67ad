"""`/metrics`: the pool's counters as the broker has them, and what this gateway saw of latency.

Kept: counters come from the broker, so every gateway of a pool shows the same ones (take the maximum over gateways, not
the sum), also for requests that came by the command line or a batch. Histograms are of the requests that this gateway
streamed while they ran; a replayed stream is never timed. Metrics named as vLLM's mean what vLLM's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from broker.admin import Depths, Snapshot
from broker.gateway.usage import PHASES

__all__ = ["CONTENT_TYPE", "GatewayMetrics", "Timer", "exported_names"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of the turns that workers ended."),
    ("generation_tokens", "generation_tokens", "Generated tokens that are in a log."),
    ("prefix_reused_tokens", "reused_tokens", "Prompt tokens that a saved prefix spared."),
    ("fenced_writes", "fenced_writes", "Writes of workers that had lost their turn, all refused."),
    ("requests_submitted", "submitted", "Requests accepted."),
    ("requests_replayed", "replayed", "Submissions that met an earlier one of the same key."),
    ("requests_refused", "refused", "Submissions refused because the queue was full."),
    ("requests_given_up", "poisoned", "Requests failed because every worker that ran them was lost."),
    ("workers_joined", "joined", "Worker incarnations that joined."),
    ("workers_reaped", "reaped", "Worker incarnations that were found dead."),
)
"""Metric, counter in the broker, help."""

_LABELLED = (
    ("request_success", "finished.", "finished_reason", ("stop", "length"), "Requests done, by why they finished."),
    (
        "requests_ended",
        "ended.",
        "state",
        ("done", "failed", "cancelled", "expired"),
        "Requests ended, by their final state.",
    ),
    ("takeovers", "moved.", "why", ("worker_lost", "preempted", "drain"), "Turns that moved to go on elsewhere."),
)
"""Metric, prefix of the broker's counters, label, values that are always shown, help."""

_WORKER_STATES = ("idle", "busy", "draining", "lapsed", "reaping")


@dataclass
class Timer:
    """When things happened to one request, in seconds of the gateway's clock."""

    began: float
    live: bool
    """It was submitted just now, and is followed while it runs."""
    last_token: float | None = None
    blocked: float = 0.0
    """Time since the last token that the gateway spent on a slow client: no part of the latency."""


class GatewayMetrics:
    """The metrics of one gateway process, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._pool = _PoolCollector()
        self._registry.register(self._pool)

        def histogram(name: str, text: str, buckets: Sequence[float], labels: Iterable[str] = ()) -> Histogram:
            return Histogram(name, text, labels, namespace="prism", registry=self._registry, buckets=buckets)

        self.first_token = histogram("time_to_first_token_seconds", "Submission to the first token.", _LONG)
        self.inter_token = histogram("inter_token_latency_seconds", "Between two tokens of a stream.", _SHORT)
        self.whole = histogram("e2e_request_latency_seconds", "Submission to the end.", _LONG)
        self.queue = histogram("request_queue_time_seconds", "Submission to the worker's take.", _LONG)
        self.phase = histogram("request_phase_seconds", "Time of a turn by phase.", _LONG, ["phase"])
        for phase in PHASES:
            self.phase.labels(phase)
        self.replays = Counter(
            "stream_replays", "Streams that were read again.", namespace="prism", registry=self._registry
        )
        self.http = Counter(
            "http_requests", "HTTP requests.", ["route", "method", "status"], namespace="prism", registry=self._registry
        )
        self._streams = Gauge("open_streams", "Streams open now.", namespace="prism", registry=self._registry)
        self.open_streams = 0

    def stream(self, by: int) -> None:
        """A stream opened (1) or closed (-1)."""
        self.open_streams += by
        self._streams.set(self.open_streams)

    def tokens(self, timer: Timer, count: int, now: float) -> None:
        """`count` tokens came."""
        if not timer.live or not count:
            return
        if timer.last_token is None:
            self.first_token.observe(now - timer.began)
            count -= 1
        if count:
            since = timer.last_token if timer.last_token is not None else now
            each = max(0.0, now - since - timer.blocked) / count
            for _ in range(count):
                self.inter_token.observe(each)
        timer.last_token, timer.blocked = now, 0.0

    def ended(self, timer: Timer, usage: dict[str, int], now: float) -> None:
        """A request ended as done."""
        if not timer.live:
            return
        self.whole.observe(now - timer.began)
        if "queue_us" in usage:
            self.queue.observe(usage["queue_us"] / 1e6)
        for phase in PHASES:
            if f"{phase}_us" in usage:
                self.phase.labels(phase).observe(usage[f"{phase}_us"] / 1e6)

    def render(self, snapshot: Snapshot | None) -> bytes:
        """The exposition; None: the broker does not answer, only the gateway's own metrics are shown."""
        self._pool.snapshot = snapshot
        return generate_latest(self._registry)


class _PoolCollector(Collector):
    """The pool's metrics from one snapshot."""

    snapshot: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("prism_broker_up", "Whether the broker answers.", int(self.snapshot is not None))
        if self.snapshot is not None:
            yield from _gauges(self.snapshot)
            yield from _counters(self.snapshot.counters)


def _gauges(snapshot: Snapshot) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"prism_{name}", text, value)

    queued = snapshot.queued
    yield gauge("num_requests_running", "Requests that workers run.", snapshot.running)
    waiting = queued.total + snapshot.boxed
    yield gauge("num_requests_waiting", "Requests in queues, and behind the active turn of a conversation.", waiting)
    yield gauge("parked_requests", "Requests for models that no worker runs now.", sum(snapshot.parked.values()))
    yield gauge("oldest_wait_seconds", "Age of the request that waits longest.", snapshot.oldest_wait_ms / 1000)
    yield gauge("wanted_workers", "Workers that the backlog needs.", snapshot.wanted_workers())
    depth = GaugeMetricFamily("prism_queue_depth", "Requests in queues, by priority.", labels=["priority"])
    for priority in ("interactive", "background", "batch"):
        depth.add_metric([priority], getattr(queued, priority))
    yield depth
    states = GaugeMetricFamily("prism_workers", "Workers, by state.", labels=["state"])
    for state in _WORKER_STATES:
        states.add_metric([state], sum(worker.state == state for worker in snapshot.workers))
    yield states
    for name, text, read in _WORKER_GAUGES:
        family = GaugeMetricFamily(f"prism_{name}", text, labels=["worker", "model"])
        for worker in snapshot.workers:
            value = read(worker.stats)
            if value is not None:
                model = worker.lease.name or worker.lease.model if worker.lease else ""
                family.add_metric([worker.name, model], value)
        yield family


def _counters(counters: dict[str, int]) -> Iterator[Metric]:
    for name, source, text in _COUNTERS:
        yield CounterMetricFamily(f"prism_{name}", text, counters.get(source, 0))
    for name, prefix, label, always, text in _LABELLED:
        family = CounterMetricFamily(f"prism_{name}", text, labels=[label])
        found = {key.removeprefix(prefix): value for key, value in counters.items() if key.startswith(prefix)}
        for what, value in sorted({**dict.fromkeys(always, 0), **found}.items()):
            family.add_metric([what], value)
        yield family
    for name, count, total, scale, text in _SUMMARIES:
        yield SummaryMetricFamily(f"prism_{name}", text, counters.get(count, 0), counters.get(total, 0) / scale)


_SUMMARIES = (
    (
        "cancel_latency_seconds",
        "cancel_latency.count",
        "cancel_latency.ms",
        1e3,
        "Cancel of a running turn to its end.",
    ),
    ("broker_flush_seconds", "flushes", "flush_us", 1e6, "A worker's append to a log."),
    ("take_wait_seconds", "takes", "queue_time.ms", 1e3, "Queued to taken, over all turns of the pool."),
)
"""Metric, counters of the count and of the sum, units per second, help."""

Read = Callable[[dict[str, str]], float | None]


def _stat(name: str) -> Read:
    return lambda stats: float(stats[name]) if name in stats else None


def _ratio(part: str, whole: str) -> Read:
    return lambda stats: (
        float(stats[part]) / max(1.0, float(stats[whole])) if part in stats and whole in stats else None
    )


_WORKER_GAUGES: tuple[tuple[str, str, Read], ...] = (
    (
        "kv_cache_usage_ratio",
        "Part of the context that the last conversation fills.",
        _ratio("live_tokens", "context_tokens"),
    ),
    ("saved_prefixes", "Prefixes kept for reuse.", _stat("saved_prefixes")),
    ("kv_bytes", "Memory planned for live keys and values.", _stat("kv_bytes")),
    ("prefix_bytes", "Memory planned for saved prefixes.", _stat("prefix_bytes")),
    ("weight_bytes", "Memory of the weights.", _stat("weight_bytes")),
)


def exported_names() -> set[str]:
    """Every sample name that `/metrics` can have, for checks of dashboards and alerts."""
    empty = Snapshot("", 0, [], 0, 0, Depths(), 0, {}, 0, {}, {})
    metrics = GatewayMetrics()
    metrics.http.labels("/", "GET", "200")
    metrics._pool.snapshot = empty
    names = {sample.name for family in metrics._registry.collect() for sample in family.samples}
    return names | {f"prism_{name}" for name, _, _ in _WORKER_GAUGES}
