"""Hosts on one machine: network namespaces on a bridge, each behind a link whose bandwidth tc limits.

    ap<id>-0  10.77.0.1 ── veth ──┐
    ap<id>-1  10.77.0.2 ── veth ──┤ bridge        tbf at both ends of every veth pair limits both directions
    ap<id>-2  10.77.0.3 ── veth ──┘

Every host has cores of its own where there are enough (taskset), as machines have.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def why_not() -> str:
    """Why this machine has no hosts as network namespaces; "" if it has."""
    missing = [name for name in ("ip", "tc", "taskset") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not installed (iproute2, util-linux)"
    name = f"aptry{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "-n", name, "link", "add", "v", "type", "veth", "peer", "name", "w")
            _run("tc", "-n", name, "qdisc", "add", "dev", "v", "root", *_tbf(100))
        finally:
            _run("ip", "netns", "del", name)
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no network namespaces with limited links here: {getattr(error, 'stderr', '') or error}".strip()
    return ""


def _tbf(megabits: float) -> list[str]:
    burst = max(16_000, int(megabits * 1e6 / 8 / 1000))  # bytes of a millisecond
    return ["tbf", "rate", f"{megabits}mbit", "burst", str(burst), "latency", "50ms"]


class Hosts:
    """`n` hosts, whose links carry `megabits` Mbit/s each way."""

    def __init__(self, n: int, megabits: float) -> None:
        self._id = f"ap{os.getpid() % 100000}"
        self.names = [f"{self._id}-{i}" for i in range(n)]
        self._bridge = f"{self._id}b"
        self._processes: list[subprocess.Popen[str]] = []
        try:
            self._create()
            self.limit(megabits)
        except subprocess.CalledProcessError:
            self.close()
            raise

    def _create(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        self._in_bridge("link", "add", "name", "bridge0", "type", "bridge")
        self._in_bridge("link", "set", "dev", "bridge0", "up")
        for i, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            self._in_bridge("link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            self._in_bridge("link", "set", f"v{i}", "master", "bridge0", "up")
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def _in_bridge(self, *command: str) -> None:
        _run("ip", "-n", self._bridge, *command)

    def limit(self, megabits: float) -> None:
        """Change the bandwidth of all links."""
        for i, name in enumerate(self.names):
            _run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *_tbf(megabits))
            _run("tc", "-n", self._bridge, "qdisc", "replace", "dev", f"v{i}", "root", *_tbf(megabits))

    def unplug(self, host: int) -> None:
        """Nothing reaches this host any more, and nothing that it sends arrives; it gets no notice."""
        self._in_bridge("link", "set", f"v{host}", "down")

    def torchrun(
        self,
        script: Path,
        *arguments: str,
        per_host: int | Sequence[int] = 1,
        timeout: float = 240.0,
        env: dict[str, str] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        start: Sequence[str] = ("-m", "torch.distributed.run"),
    ) -> list[str]:
        """What `torchrun --nnodes` of the script prints in every host. `per_host`: ranks of each host, or of every one.
        `meanwhile`: called once all have started. `start`: what Python runs for torchrun. Raises RuntimeError, with
        what each printed, where one fails."""
        counts = [per_host] * len(self.names) if isinstance(per_host, int) else per_host
        cores = sorted(os.sched_getaffinity(0))
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "GLOO_SOCKET_IFNAME": "eth0", **(env or {})}
        for i, name in enumerate(self.names):
            mine = cores[i :: len(self.names)] or cores
            command = [
                *("ip", "netns", "exec", name, "taskset", "-c", ",".join(map(str, mine))),
                *(sys.executable, *start, "--nnodes", str(len(self.names))),
                *("--nproc-per-node", str(counts[i]), "--node-rank", str(i)),
                *("--master-addr", "10.77.0.1", "--master-port", "29511", str(script), *arguments),
            ]
            pipe = subprocess.PIPE
            self._processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
        meanwhile()
        found, failed, end = [], [], time.monotonic() + timeout
        for process in self._processes:
            try:
                out, errors = process.communicate(timeout=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                out, errors = process.communicate()
            found.append(out)
            if process.returncode:
                failed.append(errors[-6000:])
        self._processes.clear()
        if failed:
            raise RuntimeError("\n".join(failed))
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in (*self.names, self._bridge):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def hosts(n: int, megabits: float) -> Iterator[Hosts]:
    """Hosts that are gone at the end."""
    made = Hosts(n, megabits)
    try:
        yield made
    finally:
        made.close()


def losses(texts: Sequence[str]) -> list[list[float]]:
    """The numbers of six digits after `loss` in each text."""
    return [[float(loss) for loss in re.findall(r"loss (-?\d+\.\d{6})", text)] for text in texts]
