"""The code of a loss is part of its measurements' keys; a file that is edited while it runs is no error."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.capture.source_code import source_code
from autopar.costs.call_signature import loss_signature

LOSS = "loss = lambda output, target: (\n    (output - target).square().mean()\n)\n"


@pytest.mark.parametrize("edited", ["loss = lambda output, target: (\n", "if True:\n", "loss = '''\n", "", None])
def test_an_edited_or_deleted_file_leaves_the_name(edited: str | None, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(LOSS)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(LOSS, str(file), "exec"), names)
    assert source_code(names["loss"]) == LOSS
    assert loss_signature(names["loss"], torch.ones(2))[0] == LOSS
    file.unlink()
    if edited is not None:
        file.write_text(edited)
    linecache.checkcache()
    assert source_code(names["loss"]) in (None, edited)
    assert loss_signature(names["loss"], torch.ones(2))[0] in ("script.<lambda>", edited)


def test_builtins_have_no_source() -> None:
    assert source_code(len) is None
