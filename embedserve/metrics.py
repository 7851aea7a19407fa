"""Every metric, named once. Processes of one server share PROMETHEUS_MULTIPROC_DIR, so that one scrape sums them all.

The variable must be set before this module is imported (the supervisor sets it in its children's environment).
"""

from __future__ import annotations

import os

import prometheus_client.values
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
    # The library asks for the pid at every update, for the sake of forks; none of our processes forks.
    _pid = os.getpid()
    prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(lambda: _pid)  # type: ignore[no-untyped-call]

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS_BUCKETS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
INPUTS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

REQUESTS = Counter("embedserve_requests", "Requests answered, by protocol and status code.", ["protocol", "code"])
REQUEST_SECONDS = Histogram(
    "embedserve_request_seconds",
    "From a request's arrival to its answer.",
    ["protocol", "lane"],
    buckets=SECONDS_BUCKETS,
)
INPUTS = Counter("embedserve_inputs", "Inputs embedded.")
TOKENS = Counter("embedserve_tokens", "Tokens embedded, special tokens and prompts included.")
STAGE_SECONDS = Histogram(
    "embedserve_stage_seconds", "Time of a request in each stage.", ["stage", "lane"], buckets=SECONDS_BUCKETS
)
TRUNCATED = Counter("embedserve_truncated", "Inputs that were cut to the model's limit.")
CANCELLED = Counter("embedserve_cancelled", "Requests whose caller left before the answer.")

QUEUED_TOKENS = Gauge("embedserve_queued_tokens", "Tokens in the waiting room.", ["lane"], multiprocess_mode="livesum")
OLDEST_ENQUEUED = Gauge(
    "embedserve_oldest_enqueued_timestamp_seconds",
    "Unix time at which the oldest waiting request was enqueued; 0 when none waits.",
    ["lane"],
    multiprocess_mode="livemax",
)
BATCH_TOKENS = Histogram("embedserve_batch_tokens", "Tokens of one forward pass.", buckets=TOKENS_BUCKETS)
BATCH_INPUTS = Histogram("embedserve_batch_inputs", "Inputs of one forward pass.", buckets=INPUTS_BUCKETS)
THREAD_BUSY = Counter("embedserve_thread_busy_seconds", "Time a thread was not waiting.", ["thread"])
ENGINE_STARVED = Counter("embedserve_engine_starved_seconds", "Time the device was idle while work waited.")
OUTPUT_BUFFERS_OUTSIDE_RING = Counter(
    "embedserve_output_buffers_outside_ring", "Batches whose output buffer was allocated because the ring had none."
)
SATURATION = Gauge(
    "embedserve_saturation",
    "Tokens in flight over the fullest frontend's share of --max-queued-tokens; at 1 requests are refused.",
    multiprocess_mode="livemax",
)
ENGINE_RESTARTS = Counter("embedserve_engine_restarts", "Engines started after the first one died.")
BUILD_INFO = Gauge(
    "embedserve_build_info",
    "Constant 1; the labels say what runs.",
    ["version", "model", "dtype", "device", "space_id", "numerics_id"],
    multiprocess_mode="livemax",
)

STAGES = ("tokenize", "queue", "forward", "pack", "reply")


def scrape() -> bytes:
    """All processes' metrics in Prometheus's text format."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def forget_process(pid: int) -> None:
    """A dead process's gauges go; its counters stay, for totals never fall."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]
