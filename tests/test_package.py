"""What is installed: `python -m build` makes a wheel and an sdist, and the wheel works without the repository."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.version import __version__

ROOT = Path(__file__).parents[1]
PACKAGES = ("autopar", "cost_models")

FACTORY = """
import torch
from torch import nn

def factory():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), (torch.ones(8, 16),)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    if importlib.util.find_spec("build") is None:
        pytest.skip('this builds the package: pip install "autopar[dev]"')
    folder = tmp_path_factory.mktemp("dist")
    # The wheel is made of what is in the sdist. Without isolation, so that nothing is downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed. Its dependencies are those of the running Python."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run(command, check=True, timeout=120)
    return folder


def run(installed: Path, folder: Path, *words: str) -> str:
    """The output of a command in `folder`, with the installed wheel ahead of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    done: Any = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.slow
def test_the_wheel_has_every_module_type_marker_and_data_file(built: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    (wheel,) = built.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert set(tracked) <= inside
    assert {f"{package}/py.typed" for package in PACKAGES} <= inside
    assert {name.split("/")[0] for name in inside} == {*PACKAGES, f"autopar-{__version__}.dist-info"}


@pytest.mark.slow
def test_wheel_and_sdist_have_the_version_and_the_licence(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name.startswith(f"autopar-{__version__}-")
    files = zipfile.ZipFile(wheel)
    header = HeaderParser().parsestr(files.read(f"autopar-{__version__}.dist-info/METADATA").decode())
    assert header["Version"] == __version__
    assert header["Requires-Python"] == ">=3.11"
    assert any(name.endswith("LICENSE") for name in files.namelist())
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "autopar/version.py"} <= names


@pytest.mark.slow
def test_the_installed_wheel_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "-m", "autopar", "--version") == f"autopar {__version__}\n"
    where = run(installed, tmp_path, "-c", "import autopar, cost_models; print(autopar.__file__, cost_models.__file__)")
    assert all(path.startswith(str(installed)) for path in where.split())
    (tmp_path / "mine.py").write_text(FACTORY)
    assert '"stages"' in run(installed, tmp_path, "-m", "autopar", "plan", "mine:factory", "--devices", "cpu,cpu",
                             "--tune", "0", "--json")  # fmt: skip
    shown = run(installed, tmp_path, "-m", "autopar", "plan", "mine:factory", "--cluster", "2xH100", "--html", "r.html")
    assert "predicted step" in shown, "data sheets are inside the wheel"
    assert "</html>" in (tmp_path / "r.html").read_text(), "and templates"


def test_the_version_stands_in_one_place() -> None:
    configuration = ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    assert configuration["metadata"]["version"] == "attr: autopar.version.__version__"
    assert __version__ in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned() -> None:
    """constraints.txt names a version of each package in setup.cfg, and that version fits what setup.cfg asks."""
    from packaging.requirements import Requirement

    configuration = ConfigParser(interpolation=None)
    configuration.read(ROOT / "setup.cfg")
    lines = configuration["options"]["install_requires"].split("\n")
    for extra in configuration["options.extras_require"].values():
        lines += extra.split("\n")
    wanted = [Requirement(line) for line in lines if line and not line.startswith("%(")]
    text = re.sub(r"#.*", "", (ROOT / "constraints.txt").read_text())
    pinned = dict(line.split("==") for line in text.split())
    for requirement in wanted:
        assert requirement.name in pinned, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[requirement.name]), f"{requirement} and constraints.txt"


def test_a_missing_optional_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every package that only an extra installs, where it is imported."""
    import autopar
    from autopar.demo import run_demo

    packages = ("transformers", "safetensors", "lightning", "accelerate")
    loaded = [name for name in sys.modules if name.startswith(tuple(f"{package}." for package in packages))]
    for name in (*packages, "safetensors.torch", "lightning.pytorch", *loaded):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    with pytest.raises(autopar.AutoparError, match=r'pip install "autopar\[demo\]"'):
        run_demo("resnet", None, print)
    from autopar import integrations

    for name, place in (("AutoparStrategy", "lightning"), ("PipelinedTrainer", "under_torchrun")):
        monkeypatch.delitem(sys.modules, f"autopar.integrations.{place}", raising=False)
        monkeypatch.delattr(integrations, place, raising=False)
        with pytest.raises(ImportError, match=rf'{name} needs \w+: pip install "autopar\[integrations\]"'):
            getattr(integrations, name)
    from autopar.runtime.checkpoints.export import export

    with pytest.raises(autopar.InputError, match=r'pip install "autopar\[safetensors\]"'):
        export(tmp_path, tmp_path / "model.safetensors")


def test_optional_packages_are_imported_where_they_are_used() -> None:
    """No module of autopar imports at its top what only an extra installs, those of integrations excepted."""
    optional = r"transformers|accelerate|lightning|safetensors|matplotlib|scipy|torchgpipe"
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if re.search(rf"^(import|from) ({optional})\b", path.read_text(), re.MULTILINE)
    }
    modules = ("lightning", "under_torchrun", "accelerate_on_ranks")
    assert found == {f"autopar/integrations/{name}.py" for name in modules}


@pytest.mark.slow
def test_planning_leaves_the_random_numbers_of_a_script_as_they_were() -> None:
    """In a process of its own: imports happen once."""
    script = (
        "import random, torch, autopar\n"
        "random.seed(0)\n"
        "before = random.getstate()\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "autopar.plan(model, ['cpu', 'cpu'], example_args=(torch.ones(8, 4),))\n"
        "print(random.getstate() == before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"


def test_every_error_that_is_exported_derives_from_autopar_error() -> None:
    exported = [getattr(autopar, name) for name in autopar.__all__ if name.endswith("Error")]
    assert autopar.DeviceError in exported
    assert all(issubclass(error, autopar.AutoparError) for error in exported)
