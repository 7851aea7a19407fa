"""The C++ bodies are compiled once, into a folder that nobody else may use; where they cannot be, torch serves.
Each case runs in a process of its own, with an empty cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import embedserve_kernels

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no g++")
SOURCE = Path(embedserve_kernels.__file__).parent / "cpp" / "varlen_attention.cpp"

# Right vectors whichever body runs; then the one that did.
SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")
import numpy as np, torch
from embedserve_kernels.varlen_attention import attention_kernels, group_equal_lengths, varlen_attention
from embedserve_kernels.varlen_attention import varlen_attention_reference
torch.set_num_threads(1)
torch.manual_seed(0)
qkv, groups = torch.randn(30, 96), group_equal_lengths(np.array([1, 9, 20]))
for _ in range(3):
    out = varlen_attention(qkv, 2, groups)
    torch.testing.assert_close(out, varlen_attention_reference(qkv, 2, groups), rtol=1e-5, atol=1e-5)
print(attention_kernels(torch.float32, 32))
"""

# Heap blocks of the exact size, so that a read or a write beyond one is caught; every width's remainders.
SANITIZER_DRIVER = """
#include "varlen_attention.cpp"
#include <vector>
int main() {
    for (int64_t body = PORTABLE; body <= AVX512; ++body)
        for (int64_t head_dim : {8, 32, 40, 80})
            for (int64_t kind = 0; kind < 4; ++kind) {
                const int64_t bfloat16 = kind % 2, causal = kind / 2, heads = 2, kv_heads = causal ? 1 : 2;
                const std::vector<int64_t> groups{0, 3, 1, 3, 2, 7, 17, 1, 16, 33, 1, 33, 66, 1, 65};
                const int64_t halves = (66 + 65 + 5) * head_dim * (2 - bfloat16);
                std::vector<uint16_t> qkv(halves * (heads + 2 * kv_heads), 0x3F01), out(halves * heads);
                const int32_t failed = varlen_attention(qkv.data(), out.data(), bfloat16, 66 + 65 + 5, groups.data(),
                                                        5, heads, kv_heads, head_dim, causal, body);
                if (failed > 1 || (body == PORTABLE && failed)) return 3;
            }
}
"""


@needs_compiler
def test_compiles_into_a_private_folder(tmp_path):
    assert attend(tmp_path) == ("cpp", "")
    folder = tmp_path / "embedserve" / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    (library,) = folder.glob("*.so")
    assert {path.name for path in folder.iterdir()} == {library.name, "lock"}
    compiled_at = library.stat().st_mtime_ns
    assert attend(tmp_path) == ("cpp", "")
    assert library.stat().st_mtime_ns == compiled_at


@needs_compiler
def test_four_processes_at_once_share_one_file(tmp_path):
    processes = [start(tmp_path) for _ in range(4)]
    assert [finish(process) for process in processes] == [("cpp", "")] * 4
    assert len(list((tmp_path / "embedserve" / "kernels").iterdir())) == 2  # the library and the lock


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false", "'"])
def test_without_a_compiler_torch_serves_and_one_line_says_so(compiler, tmp_path):
    kernels, log = attend(tmp_path, CXX=compiler)
    assert kernels == "torch"
    assert log.count("\n") == 1
    assert log.startswith("embedserve_kernels.cpp_library INFO varlen_attention runs in torch")


@needs_compiler
def test_a_failed_compile_leaves_nothing_behind(tmp_path):
    kernels, log = attend(tmp_path, CXX=f"{COMPILER} -include /nowhere.h")  # answers --version, and compiles nothing
    assert kernels == "torch"
    assert log.count("\n") == 1
    assert [path.name for path in (tmp_path / "embedserve" / "kernels").iterdir()] == ["lock"]


@pytest.mark.parametrize("mode", [0o770, 0o755, 0o702])
def test_a_folder_that_others_may_use_is_refused(mode, tmp_path):
    folder = tmp_path / "embedserve" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    kernels, log = attend(tmp_path)
    assert kernels == "torch"
    assert log.count("\n") == 1
    assert f"others may use {folder}" in log
    assert not list(folder.iterdir())


def test_a_linked_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "embedserve").mkdir(mode=0o700)
    (tmp_path / "embedserve" / "kernels").symlink_to(tmp_path / "elsewhere")
    kernels, log = attend(tmp_path)
    assert kernels == "torch"
    assert "is a link" in log
    assert not list((tmp_path / "elsewhere").iterdir())


def test_importing_compiles_nothing(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", "import embedserve_kernels.varlen_attention"]
    subprocess.run(command, env=environment, check=True, timeout=100)
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_no_access_out_of_bounds_and_no_undefined_behaviour(tmp_path):
    driver, program = tmp_path / "driver.cpp", tmp_path / "driver"
    sanitize = [str(COMPILER), "-std=c++17", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    driver.write_text("int main() {}")
    if subprocess.run([*sanitize, str(driver), "-o", str(program)], capture_output=True, timeout=100).returncode:
        pytest.skip("the sanitizers' libraries are not installed")
    driver.write_text(SANITIZER_DRIVER)
    include = f"-I{SOURCE.parent}"
    built = subprocess.run(
        [*sanitize, include, str(driver), "-o", str(program)], capture_output=True, text=True, timeout=200
    )
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env={name: value for name, value in os.environ.items() if name != "CXX"}
        | {"XDG_CACHE_HOME": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """-> the kernels that ran, and what was logged"""
    out, log = process.communicate(timeout=200)
    assert process.returncode == 0, log
    return out.strip(), log


def attend(cache: Path, **environment: str) -> tuple[str, str]:
    return finish(start(cache, **environment))
