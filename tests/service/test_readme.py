"""What the README shows and lists is what the server does.
Knows the README's form: a Python block, then a text block with what it prints; tables with names in backquotes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedserve.config import Config

if TYPE_CHECKING:
    from typing import Protocol

    class Server(Protocol):
        http_url: str
        grpc_target: str


README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("code", "printed"), SNIPPETS, ids=["openai", "embed", "embed_full", "in-process"])
def test_snippet_prints_what_the_readme_says(code: str, printed: str, server: Server) -> None:
    code = code.replace("http://127.0.0.1:8080", server.http_url).replace("127.0.0.1:50051", server.grpc_target)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == (printed, "")


def test_every_flag_is_listed_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", README, re.MULTILINE))
    flags = {f"--{item.name.replace('_', '-')}": shown_default(item.default) for item in fields(Config)}
    del flags["--model"]  # the one argument without a flag
    assert listed == flags


def shown_default(default: object) -> str:
    if default is None or default == ():
        return "auto"
    if default is False:
        return "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_every_metric_is_listed() -> None:
    script = """
import json
import embedserve.metrics
from prometheus_client import REGISTRY
ours = [metric for metric in REGISTRY.collect() if metric.name.startswith("embedserve_")]
print(json.dumps([metric.name + "_total" * (metric.type == "counter") for metric in ours]))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    listed = set(re.findall(r"`(embedserve_[a-z_]+)`", README.partition("## Metrics")[2]))
    assert listed - {"embedserve_client"} == set(json.loads(done.stdout))


@pytest.mark.parametrize("path", re.findall(r"^\| `GET (\S+)`", README, re.MULTILINE))
def test_every_listed_get_endpoint_answers(path: str, server: Server) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.http_url + path, timeout=30) as response:
        assert response.status == 200
        assert response.read()
