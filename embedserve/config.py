"""Every setting once: its name, default, unit, help and check. A Config is frozen and crosses processes as JSON.

Knows neither argv nor the environment (cli.py reads those), and nothing of the model.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from embedserve.errors import StartError

AUTO_MAX_BATCH_TOKENS = 4096  # beyond it a CPU's throughput no longer grows
AUTO_MAX_BATCH_MS = 25.0  # what a query may have to wait for
AUTO_MAX_QUEUED_TOKENS = 1 << 20  # 4 MiB of token ids


def setting(default: Any, help: str, *, choices: tuple[str, ...] = (), least: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "least": least})


@dataclass(frozen=True)
class Config:
    """None stands for "auto". Raises StartError when a value is out of range."""

    model: str | None = setting(None, "a local folder or a hub id; without one, the bundled all-MiniLM-L6-v2")
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    host: str = setting("127.0.0.1", "address to listen on")
    http_port: int = setting(8080, "port of the OpenAI-compatible endpoint; 0 takes a free one", least=0)
    grpc_port: int = setting(50051, "port of the gRPC endpoint; 0 takes a free one", least=0)
    frontends: int | None = setting(None, "frontend processes; auto is one per four cores, at most four", least=1)
    device: str = setting("auto", "where the model runs", choices=("auto", "cpu"))
    dtype: str = setting(
        "auto",
        "of weights and forward; auto is bfloat16 where the device computes in it, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = setting(
        "auto",
        "of the weights: auto reads the folder's safetensors; dummy makes random ones, to measure speed",
        choices=("auto", "dummy"),
    )
    backend: str = setting(
        "auto",
        "what runs the model; auto is native, or sentence-transformers for a model that native does not serve",
        choices=("auto", "native", "sentence-transformers"),
    )
    threads: int | None = setting(None, "CPU threads of all forward passes together; auto is every core", least=1)
    forwards: int | None = setting(
        None, "forward passes side by side on a CPU; auto is one per thread for small models, else one", least=1
    )
    served_model_name: tuple[str, ...] = setting((), "names that requests may ask for; auto is the model's own")
    max_batch_tokens: int | None = setting(
        None, f"tokens in one forward, at most; auto is {AUTO_MAX_BATCH_TOKENS}", least=1
    )
    max_batch_ms: float | None = setting(
        None, f"time of one forward, at most, by its measured speed; auto is {AUTO_MAX_BATCH_MS:g}", least=1
    )
    max_queued_tokens: int | None = setting(
        None, f"tokens waiting or running, all frontends together; auto is {AUTO_MAX_QUEUED_TOKENS}", least=1
    )
    max_input_tokens: int | None = setting(None, "tokens of one input; auto is the model's own limit", least=3)
    max_inputs: int = setting(2048, "inputs in one request", least=1)
    max_body_mb: float = setting(32, "size of one request, in MB (10^6 bytes)", least=0.001)
    request_timeout_s: float = setting(60.0, "a request not answered by then fails", least=0.001)
    drain_s: float = setting(30.0, "on SIGTERM, time for what is in flight to finish", least=0)
    stuck_after_s: float = setting(30.0, "/ready is red when work waited so long unanswered", least=1)
    auto_truncate: bool = setting(False, "cut inputs that are too long, and say so in the reply")
    token_ids: str = setting(
        "refuse",
        "what token ids on HTTP are: refuse them, or take them as the model's own",
        choices=("refuse", "model"),
    )
    log_format: str = setting("text", "of the log on stderr", choices=("text", "json"))

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least, choices = getattr(self, item.name), item.metadata["least"], item.metadata["choices"]
            flag = "--" + item.name.replace("_", "-")
            if isinstance(value, float) and not math.isfinite(value):
                raise StartError(f"{flag} is {value}; it must be a finite number.")
            if value is not None and least is not None and value < least:
                raise StartError(f"{flag} is {value}; it must be at least {least}.")
            if choices and value not in choices:
                raise StartError(f"{flag} is {value!r}; it must be one of {', '.join(choices)}.")
        for port in (self.http_port, self.grpc_port):
            if port > 65535:
                raise StartError(f"port {port} does not exist; ports end at 65535.")
        if self.http_port == self.grpc_port != 0:
            raise StartError(f"--http-port and --grpc-port are both {self.http_port}; they must differ.")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1_000_000)

    @property
    def batch_tokens_limit(self) -> int:
        return self.max_batch_tokens or AUTO_MAX_BATCH_TOKENS

    @property
    def batch_ms_limit(self) -> float:
        return self.max_batch_ms or AUTO_MAX_BATCH_MS

    @property
    def queued_tokens_limit(self) -> int:
        return self.max_queued_tokens or AUTO_MAX_QUEUED_TOKENS

    @property
    def queued_tokens_share(self) -> int:
        """What one frontend may have waiting or running."""
        return max(1, self.queued_tokens_limit // self.frontend_count)

    @property
    def frontend_count(self) -> int:
        return self.frontends or max(1, min(4, available_cores() // 4))


def available_cores() -> int:
    """Cores this process may use: its affinity mask, or fewer where the control group has a quota (docker --cpus)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
