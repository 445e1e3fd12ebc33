"""What all tests share: one thread an operator, measurements kept out of the user's cache, and no model downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Set before a test module imports transformers, which reads it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path_factory.mktemp("measurements")))
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
