"""The committed protobuf code is what the committed protocol generates.
Knows protoc's command line, and must not know the messages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTO = Path("embedserve/v1/embedding.proto")


def test_generated_code_matches_the_protocol(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", *outputs, f"protos/{PROTO}"]
    subprocess.run(command, cwd=ROOT, check=True)

    generated = {path.name: path.read_text() for path in (tmp_path / PROTO.parent).iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / PROTO.parent).glob("embedding_pb2*.py*")}
    assert generated.keys() == committed.keys(), "run `make proto`"
    for name in generated:
        assert generated[name] == committed[name], f"{name} is out of date; run `make proto`"
