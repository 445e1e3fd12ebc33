"""Freed memory stays with the process. In processes of their own: the setting cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("resource")

_FAULTS = """
import resource, sys, threading
import torch, autopar
if sys.argv[1] == "keep":
    assert autopar.keep_freed_memory()

def step():
    tensors = [torch.ones(size) for size in (100_000, 2_000_000, 10_000_000)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def steps():
    for _ in range(10):
        step()
    before = faults()
    for _ in range(5):
        step()
    print(faults() - before)

worker = threading.Thread(target=steps)
worker.start()
worker.join()
"""


def _faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is glibc's")
@pytest.mark.slow
def test_kept_memory_is_used_again_without_page_faults() -> None:
    pages = 5 * 12_100_000 * 4 // 4096
    given_back = _faults("give back")
    if given_back < pages // 4:
        pytest.skip("this machine gives memory out in large pages, or its C library keeps it anyway")
    assert _faults("keep") < given_back // 10


def test_a_c_library_without_the_setting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    import autopar

    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not autopar.keep_freed_memory()
