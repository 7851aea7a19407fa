"""CPU time of a tree of processes, by process and by thread name, from Linux's /proc.
Knows process ids and text; nothing of what the processes do. The kernel counts in ticks, of 10 ms."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
TITLE_LENGTH = 60


@dataclass(frozen=True)
class ThreadUse:
    """Between two snapshots, all threads of one name in one process."""

    name: str
    count: int
    cpu_s: float
    switches: int  # of context


@dataclass(frozen=True)
class ProcessUse:
    """`cpu_s` includes threads that ended, which `threads` does not."""

    pid: int
    title: str
    cpu_s: float
    threads: tuple[ThreadUse, ...]  # the busiest first


@dataclass(frozen=True)
class Thread:
    """One thread so far."""

    name: str
    cpu_s: float
    switches: int


@dataclass(frozen=True)
class Process:
    """One process so far."""

    title: str
    cpu_s: float
    threads: dict[int, Thread]


Snapshot = dict[int, Process]


def use_between(before: Snapshot, after: Snapshot) -> tuple[ProcessUse, ...]:
    """What each process of `after` used since `before`; the busiest first. One that ended is not in it."""
    none = Process("", 0.0, {})
    uses = [process_use(pid, before.get(pid, none), process) for pid, process in after.items()]
    return tuple(sorted(uses, key=lambda use: -use.cpu_s))


def snapshot(root_pid: int) -> Snapshot:
    """`root_pid` and all that descend from it. Empty when there is no such process."""
    found = {pid: read_process(pid) for pid in process_tree(root_pid)}
    return {pid: process for pid, process in found.items() if process is not None}


def process_tree(root_pid: int) -> list[int]:
    """`root_pid` first, each parent before its children."""
    children: dict[int, list[int]] = defaultdict(list)
    pids = set()
    for name in os.listdir(PROC):
        if name.isdecimal() and (stat := read(PROC / name / "stat")) is not None:
            pids.add(int(name))
            children[parse_stat(stat).parent_pid].append(int(name))
    tree = [root_pid] if root_pid in pids else []
    for pid in tree:  # which grows as it is walked
        tree.extend(children[pid])
    return tree


def read_process(pid: int) -> Process | None:
    folder = PROC / str(pid)
    stat, title = read(folder / "stat"), read(folder / "cmdline")
    if stat is None or title is None:
        return None
    threads = {}
    for tid in list_threads(pid):
        thread = read_thread(folder / "task" / str(tid))
        if thread is not None:
            threads[tid] = thread
    return Process(parse_title(title), parse_stat(stat).cpu_s, threads)


def list_threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROC / str(pid) / "task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def read_thread(folder: Path) -> Thread | None:
    stat, status = read(folder / "stat"), read(folder / "status")
    if stat is None or status is None:
        return None
    parsed = parse_stat(stat)
    return Thread(parsed.name, parsed.cpu_s, parse_switches(status))


def read(path: Path) -> str | None:
    """None when its process or thread has ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None


@dataclass(frozen=True)
class Stat:
    name: str
    parent_pid: int
    cpu_s: float


def parse_stat(text: str) -> Stat:
    """/proc/PID/stat or /proc/PID/task/TID/stat, see proc_pid_stat(5). A name may hold spaces and parentheses."""
    before, _, after = text.rpartition(") ")
    fields = after.split()  # from the third, the state
    return Stat(before.split(" (", 1)[1], int(fields[1]), (int(fields[11]) + int(fields[12])) * TICK_S)


def parse_switches(text: str) -> int:
    """Voluntary and other context switches from /proc/PID/task/TID/status."""
    return sum(int(line.split()[1]) for line in text.splitlines() if "voluntary_ctxt_switches:" in line)


def parse_title(text: str) -> str:
    """/proc/PID/cmdline as one line: arguments end in NUL, and a title that was set may be padded with it."""
    title = " ".join(text.replace("\0", " ").split())
    return title if len(title) <= TITLE_LENGTH else title[: TITLE_LENGTH - 1] + "…"


def process_use(pid: int, before: Process, after: Process) -> ProcessUse:
    by_name: dict[str, list[tuple[float, int]]] = defaultdict(list)
    none = Thread("", 0.0, 0)
    for tid, thread in after.threads.items():
        earlier = before.threads.get(tid, none)
        by_name[thread.name].append((thread.cpu_s - earlier.cpu_s, thread.switches - earlier.switches))
    threads = [
        ThreadUse(name, len(uses), sum(cpu_s for cpu_s, _ in uses), sum(switches for _, switches in uses))
        for name, uses in by_name.items()
    ]
    threads.sort(key=lambda use: -use.cpu_s)
    return ProcessUse(pid, after.title, after.cpu_s - before.cpu_s, tuple(threads))
