"""Directories of checkpoints: their names, and what else may lie beside them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from torch import nn

import autopar


@pytest.mark.parametrize("end", ["", ".partial", ".replaced"])
@pytest.mark.parametrize("kind", ["file", "link", "link to nothing"])
def test_what_is_in_the_place_of_a_directory_is_named_before_saving(tmp_path: Path, end: str, kind: str) -> None:
    folder = tmp_path / "runs"
    path = folder / f"step-00000007{end}"
    folder.mkdir()
    if kind == "file":
        path.write_text("kept")
    else:
        path.symlink_to(tmp_path if kind == "link" else tmp_path / "nothing")
    words = f"step-00000007 cannot be saved: {path} is a file or a link, where saving makes a directory; move it away"
    for _ in range(2):
        with pytest.raises(autopar.CheckpointError, match=re.escape(words)):
            autopar.save(folder, nn.Linear(2, 2), step=7)
    assert list(folder.iterdir()) == [path]
    path.unlink()
    assert autopar.save(folder, nn.Linear(2, 2), step=7).path == folder / "step-00000007"


@pytest.mark.parametrize("how", ["copy", "link"])
def test_a_checkpoint_under_another_name_is_loaded(tmp_path: Path, how: str) -> None:
    model, best = nn.Linear(2, 2), tmp_path / "runs" / "best"
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        autopar.save(best.parent, model, step=step)
    if how == "copy":
        shutil.copytree(best.parent / "step-00000001", best)
    else:
        best.symlink_to("step-00000001")
    for step in (None, 1):
        nn.init.zeros_(model.weight)
        found = autopar.load(best, model, step=step)
        assert found is not None
        assert (found.path, found.step) == (best, 1)
        assert bool((model.weight == 1).all())
    with pytest.raises(autopar.InputError, match="best is the checkpoint of step 1, not of step=2: leave step out"):
        autopar.load(best, model, step=2)
    newest = autopar.load(best.parent, model)
    assert newest is not None
    assert newest.step == 2
    (best / "__0_0.distcp").unlink()
    words = f"that can be loaded: {best} (__0_0.distcp is missing)"
    with pytest.raises(autopar.CheckpointError, match=re.escape(words)):
        autopar.load(best, model)


def test_a_file_of_the_manifests_name_makes_no_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "manifest.json").write_text('{"name": "an application", "version": 3}')
    assert autopar.load(tmp_path, model, required=False) is None
    autopar.save(tmp_path, model, step=1)
    found = autopar.load(tmp_path, model)
    assert found is not None
    assert found.step == 1
