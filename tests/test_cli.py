"""The command line: results on stdout, messages on stderr, exit status 0, 1 (autopar's errors) or 2 (usage)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import typer
from report_plans import Page
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar import Plan
from autopar import demo as demo_room
from autopar.cli import app
from autopar.options import HELP, CompareKeywords, PlanKeywords, PlanOptions
from autopar.plan.stage import Stage
from autopar.report.quantities import seconds_text
from autopar.report.tables import milliseconds

FACTORIES = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())

def with_args():
    return net(), (torch.ones(4, 8),)

def with_kwargs():
    return net(), {"input": torch.ones(4, 8)}

def with_both():
    return net(), (torch.ones(4, 8),), {}

class Kinds:
    @staticmethod
    def with_loss():
        return {"model": net(), "example_args": (torch.ones(4, 8),), "target": torch.ones(4, 8),
                "loss_fn": nn.functional.mse_loss}

def nonsense():
    return "model"

def misspelt():
    return {"model": net(), "args": (torch.ones(4, 8),)}

def wrong_input():
    return net(), (torch.ones(4, 5),)

number = 5

class Decides(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def uncapturable():
    return Decides(), (torch.ones(4, 8),)

def takes_arguments(width, *, depth):
    return net(), (torch.ones(4, 8),)

def raises():
    return nn.Linear(2, 3)(torch.ones(4, 5))

def exits():
    raise SystemExit(3)

def talks():
    print("building the model")
    return with_args()

def bad_loss(output, target):
    return output + torch.ones(3, 5)

def loss_raises():
    return {"model": net(), "example_args": (torch.ones(4, 8),), "target": torch.ones(4, 8), "loss_fn": bad_loss}
"""


def line_of(text: str, file: str = "factories.py") -> str:
    """`file:line` of the first line with this text."""
    lines = Path(file).read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.fixture(autouse=True)
def _factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("factories", None)


ON_CPU = ("plan", "factories:with_args", "--devices", "cpu")
TWICE = ("--split", "mine=0:0", "--split", "mine=0:0,2:1")
ON_CLUSTER = ("compare", "factories:with_args", "--cluster", "2xH100")


def run(*args: str, status: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of a command."""
    result = CliRunner().invoke(app, args)
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["with_args", "with_kwargs", "with_both", "Kinds.with_loss"])
def test_a_factory_may_return_its_example_in_any_form(factory: str) -> None:
    out, _ = run("plan", f"factories:{factory}", "--devices", "cpu", "--json")
    assert Plan.from_json(out).used_devices == ("cpu:0",)


def test_a_plan_is_printed_saved_and_steered() -> None:
    options = ("--n-microbatches", "2", "--schedule", "1f1b", "--max-replicas", "1", "--memory-limit", "1e9")
    out, _ = run("plan", "factories:with_args", "--devices", "cpu,cpu", *options, "--save", "plan.json")
    plan = Plan.load("plan.json")
    assert out == f"{plan}\n"
    assert (plan.n_microbatches, plan.schedule, plan.devices) == (2, "1f1b", ("cpu:0", "cpu:1"))


def test_a_command_has_every_option_of_its_call_with_the_same_default() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, known in (("plan", PlanKeywords), ("compare", CompareKeywords)):
        defaults = {parameter.name: parameter.default for parameter in commands[name].params}
        wanted = {key: getattr(PlanOptions(), key) for key in HELP if key in get_type_hints(known)}
        assert wanted.items() <= defaults.items()
    run("plan", "factories:with_args", "--devices", "cpu", "--optimizer", "sgd", "--batch-norm", "exact")
    _, err = run("plan", "factories:with_args", "--devices", "cpu", "--optimizer", "lion", status=2)
    assert "known are none, sgd" in err


def test_a_plan_is_converted_for_another_tool() -> None:
    stages = tuple(Stage((f"cuda:{s}",), (f"layers.{s}/linear#0",)) for s in range(2))
    Plan(stages, 4, "zb-h1", 8).save("plan.json")
    out, err = run("convert", "plan.json", "--to", "megatron")
    assert "--pipeline-model-parallel-size 2" in out
    assert "not expressed: schedule: zb-h1; Megatron-LM runs 1f1b" in err
    out, _ = run("convert", "plan.json", "--to", "torchtitan", "--save", "arguments.txt")
    assert Path("arguments.txt").read_text() == out
    assert Path("schedule.csv").read_text().startswith("0F0,0F1,")
    _, err = run("convert", "plan.json", "--to", "torchtitan")
    assert "schedule.csv, which --save writes" in err
    out, _ = run("convert", "plan.json", "--to", "deepspeed", "--json")
    assert json.loads(out)["settings"]["config"]["train_batch_size"] == 8
    _, err = run("convert", "plan.json", "--to", "accelerate", status=2)
    assert "it has no pipelines" in err
    _, err = run("convert", "plan.json", "--to", "fairscale", status=2)
    assert "known are torchtitan" in err


@pytest.mark.slow
def test_the_configuration_of_another_tool_is_compared() -> None:
    Path("arguments.txt").write_text("--tensor-model-parallel-size 2 --micro-batch-size 4")
    out, _ = run(*ON_CLUSTER, "--configuration", "megatron=arguments.txt", "--by-hand", "mine=tensor=2,micro_batch=4")
    rows = {
        line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()[:1] in (["megatron"], ["mine"])
    }
    assert rows["megatron"] == rows["mine"]


def test_a_configuration_that_cannot_be_read_is_refused() -> None:
    _, err = run(*ON_CLUSTER, "--configuration", "megatron=none.txt", status=2)
    assert "none.txt: it cannot be read" in err
    _, err = run(*ON_CLUSTER, "--configuration", "megatron", status=2)
    assert "is not TOOL=FILE" in err


@pytest.mark.slow
def test_a_plan_is_tuned_and_explained_on_request() -> None:
    out, _ = run("plan", "factories:with_args", "--devices", "cpu,cpu", "--tune", "2", "--explain")
    # Steps of disturbed rounds do not count.
    assert re.search(r"tuned over [1-9]\d* steps? each, predicted / measured: ", " ".join(out.split()))
    assert "The bottleneck is stage" in out
    out, err = run("plan", "factories:with_args", "--devices", "cpu,cpu", "--json", "--explain")
    assert json.loads(out)["stages"]
    assert "The bottleneck is stage" in err


def test_a_plan_ahead_limits_shards_and_explains_modules() -> None:
    out, _ = run("plan", "factories:with_args", "--cluster", "2xH100", "--max-shards", "1", "--explain-inside", "0")
    assert re.search(r"0/linear#0 +stage 0 is not split: all on .*\n +0\.0:H100", out)


@pytest.mark.slow
def test_reports_are_written_for_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "a report.html"
    words = ("factories:with_args", "--cluster", "2xH100", "--html", str(page))
    for command, part in (("plan", "predicted"), ("profile", "slowest operator"), ("compare", "fastest that fits")):
        page.unlink(missing_ok=True)
        text, _ = run(command, *words)
        assert page.resolve().as_uri() in text.splitlines()[-1]
        assert part in page.read_text()
    monkeypatch.setattr(sys, "argv", ["autopar", "plan", *words])
    run("plan", *words, "--price-per-device-hour", "2", "--samples-per-epoch", "1000")
    assert "price per epoch" in page.read_text()
    assert f"--html &#39;{page}&#39;" in page.read_text(), "the command that made it"
    for command in ("profile", "compare"):
        monkeypatch.setattr(sys, "argv", ["autopar", command, *words])
        run(command, *words)
        assert f"autopar {command} factories:with_args --cluster 2xH100" in page.read_text()
    out, err = run("plan", *words, "--json")
    assert json.loads(out)["stages"]
    assert str(page) in err
    _, err = run("plan", "factories:with_args", "--html", str(tmp_path / "no folder" / "x.html"), status=2)
    assert "--html" in err


@pytest.mark.slow
def test_plans_by_hand_are_compared_on_a_cluster() -> None:
    arguments = ("factories:Kinds.with_loss", "--cluster", "2xH100", "--by-hand", "mine=tensor=2", "--by-hand")
    out, _ = run("compare", *arguments, "dp=data=2,zero=1", "--json")
    assert [row["name"] for row in json.loads(out)["rows"]] == ["auto", "mine", "dp"]
    text, _ = run("compare", *arguments, "dp=data=2,zero=1,overlap=gradients,launch=compiled")
    assert "dp is priced for a step with" in " ".join(text.split())
    assert "mine: 1 stage (1 replica on meshes of 2)" in " ".join(text.split())


def test_a_profile_is_printed_as_text_or_json() -> None:
    text, _ = run("profile", "factories:with_args", "--devices", "cpu")
    assert "the whole model" in text
    out, _ = run("profile", "factories:with_args", "--devices", "cpu", "--json", "--no-cache")
    assert {module["name"] for module in json.loads(out)["modules"]} == {"", "0", "1", "2", "3"}


@pytest.mark.slow
def test_splits_by_hand_and_other_systems_are_compared() -> None:
    modules = ("compare", "factories:with_args", "--devices", "cpu,cpu", "--repeats", "1", "--n-microbatches", "2")
    out, _ = run(*modules, "--split", "half=0:0,2:1", "--system", "plain", "--json")
    data = json.loads(out)
    assert [row["name"] for row in data["rows"]] == ["one device", "auto", "half"]
    assert data["rows"][2]["stages"] == [["cpu:0"], ["cpu:1"]]
    assert data["rows"][2]["n_microbatches"] == 2
    assert [row["name"] for row in data["systems"]] == ["plain"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--system", "pipe"), "there is no system 'pipe'"),
        (("--split", "half=0"), "is not NAME=MODULE:STAGE"),
        (("--split", "half=layers.0:0,layers.1:0:1"), "MODULE:STAGE,...: 'layers.1:0:1' is no MODULE:STAGE"),
        (("--by-hand", "dp=dta=2"), "there is no degree 'dta'; did you mean 'data'?"),
        (("--configuration", "megatron"), "is not TOOL=FILE"),
        (("--schedule", "1f2b"), "1f1b"),
        (("--html", "r.pdf"), "a report is a page in HTML"),
    ],
)
def test_what_compare_cannot_read_is_refused_before_the_model_is_made(wrong: tuple[str, str], message: str) -> None:
    _, err = run("compare", "no_such_module:factory", "--by-hand", "tp=tensor=2", *wrong, status=2)
    assert message in " ".join(err.split())
    assert "no_such_module" not in err


@pytest.mark.slow
def test_saved_plans_are_compared_with_the_automatic_one() -> None:
    Plan.from_split({"0": 0, "2": 1}, n_microbatches=2).save("hand.json")
    arguments = ("factories:Kinds.with_loss", "--devices", "cpu,cpu", "--plan", "hand=hand.json", "--repeats", "1")
    out, _ = run("compare", *arguments, "--json")
    assert [row["name"] for row in json.loads(out)["rows"]] == ["one device", "auto", "hand"]
    text, _ = run("compare", *arguments)
    assert "hand" in text


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (("plan", "factories:uncapturable", "--strict", "--devices", "cpu"), "cannot capture", 1),
        (("plan", "factories:with_args", "--devices", "cpu", "--memory-limit", "1"), "no plan fits", 1),
        (("plan", "factories:wrong_input", "--devices", "cpu"), "the model itself raised RuntimeError", 2),
        (("plan", "factories:wrong_input", "--cluster", "2xT4"), "the model itself raised RuntimeError", 2),
        (("plan", "factories:number"), "factories:number is an int, not a callable", 2),
        (("plan", "factories:nonsense"), "must return", 2),
        (("plan", "factories:misspelt"), "args", 2),
        (("plan", "factories:with_args", "--devices", "tpu"), "tpu", 2),
        (("plan", "factories:with_args", "--memory-limit", "8 apples"), "'8 apples'", 2),
        (("compare", "factories:with_args", "--devices", "cpu", "--plan", "bad=factories.py"), "not a plan", 2),
        (("plan", "factories:with_args", "--cluster", "H100x8"), "did you mean '8xH100'?", 2),
        (("plan", "factories:with_args", "--cluster", "factories.toml"), "no file", 2),
        (("diff", "no.json", "no.json"), "error: no.json: it cannot be read: No such file or directory\n", 2),
        (("export", "no_such_folder", "a.safetensors"), "there is no directory 'no_such_folder'", 2),
        ((*ON_CPU, "--html", "r.html", "--samples-per-epoch", "-5"), "samples_per_epoch must be a finite number", 2),
        ((*ON_CPU, "--price-per-device-hour", "2"), "it is for the report: give --html as well", 2),
        ((*ON_CLUSTER, "--by-hand", "mine=tensr=2"), "did you mean 'tensor'?", 2),
        ((*ON_CLUSTER, "--by-hand", "tensor"), "is not NAME=DEGREE=VALUE", 2),
        ((*ON_CLUSTER, "--by-hand", "tensor=2,zero=1"), "it has no name; write NAME=tensor=2,zero=1", 2),
        ((*ON_CLUSTER, "--by-hand", "tensor", "--by-hand", "b=zero="), "zero has no value", 2),
        ((*ON_CLUSTER, "--by-hand", "mine=tensor=2,tensor=1"), "it gives tensor twice", 2),
        ((*ON_CLUSTER, *TWICE), "another plan has the name 'mine'; give this one another", 2),
        ((*ON_CLUSTER, "--split", "half=0:0,0:1"), "gives '0' twice", 2),
        ((*ON_CLUSTER, "--split", "half=0:0,1:2"), "half: no module is put on stage 1", 2),
        ((*ON_CLUSTER, "--by-hand", "mine=tensor=two,zero=4"), "zero must be one of 0, 1, 2, 3, got 4", 2),
        ((*ON_CLUSTER, "--by-hand", "a=tensr=2,zero=,zero=1,data"), "zero has no value", 2),
        ((*ON_CLUSTER, "--by-hand", "a=data=2", "--by-hand", "a=data=2"), "another plan has the name 'a'", 2),
        (
            (*ON_CLUSTER, "--by-hand", "a=zero=4", "--by-hand", "b=recompute=all"),
            "b: the plan by hand cannot be followed",
            2,
        ),
        ((*ON_CLUSTER, "--by-hand", "a=zero=4,launch=slow"), "launch must be one of", 2),
        ((*ON_CLUSTER, "--split", "auto=0:0,2:1"), "the automatic plan has the name 'auto'", 2),
        ((*ON_CLUSTER, "--split", "a=0:0,2:1", "--split", "a=0:0,1:1"), "another plan has the name 'a'", 2),
        ((*ON_CLUSTER, "--figure", "compared.jpeg2"), "the name must end in .png, .svg or .pdf", 2),
        ((*ON_CLUSTER, "--figure", "compared"), "the name must end in .png, .svg or .pdf", 2),
    ],
)
def test_errors_are_on_stderr_with_a_status_that_says_whose_they_are(
    arguments: tuple[str, ...], message: str, status: int
) -> None:
    out, err = run(*arguments, status=status)
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",),
        ("plan", "factories"),
        ("plan", "no_such_module:factory"),
        ("plan", "factories:no_such_factory"),
        ("plan", "factories:torch"),
        ("plan", "factories:with_args", "--no-such-option"),
        ("compare", "factories:with_args", "--plan", "hand.json"),
        ("compare", "factories:with_args", "--plan", "hand=no_such_file.json"),
        ("compare", "factories:with_args", "--split", "half=0"),
        ("compare", "factories:with_args", "--split", "0:0,1:1"),
        ("demo", "--model", "no_such_model"),
        ("no-such-command",),
    ],
)
def test_wrong_usage_has_status_2(arguments: tuple[str, ...]) -> None:
    out, err = run(*arguments, status=2)
    assert out == ""
    assert err != ""


@pytest.mark.parametrize(
    ("code", "line", "message"),
    [
        ("def factory(:\n    pass\n", 1, "SyntaxError: "),
        ("\nimport no_such_dependency\n", 2, "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("import torch\nfrom torch import no_such_name\n", 2, "ImportError: cannot import name 'no_such_name'"),
        ("\n\n1 / 0\n", 3, "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('usage: ...')\n", 2, "__name__ == '__main__'"),
    ],
)
def test_an_error_in_the_users_file_is_one_line_with_the_file_and_the_line(code: str, line: int, message: str) -> None:
    name = f"broken_{abs(hash(code))}"
    Path(f"{name}.py").write_text(code)
    out, err = run("plan", f"{name}:factory", status=2)
    assert out == ""
    assert err.startswith(f"error: {name}.py:{line}: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("factory", "where", "message"),
    [
        ("takes_arguments", "def takes_arguments", "takes width, depth, but a factory is called without arguments"),
        ("raises", "nn.Linear(2, 3)", "RuntimeError: "),
        ("exits", "SystemExit(3)", " factories:exits ends the program (exit 3); "),
        ("nonsense", "def nonsense", "must return (model, args)"),
        ("loss_raises", "output + torch.ones(3, 5)", "RuntimeError: The size of tensor"),
    ],
)
def test_a_wrong_factory_is_one_line_with_the_file_and_the_line(factory: str, where: str, message: str) -> None:
    _, err = run("compare", f"factories:{factory}", "--devices", "cpu", status=2)
    last = err.splitlines()[-1]
    assert last.startswith(f"error: {line_of(where)}: ")
    assert message in last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--by-hand", "a=data=2", "--split", "a=0:0"), "another plan has the name 'a'"),
        (("--by-hand", "one device=data=2"), "the plain model has the name 'one device'"),
        (("--by-hand", "DDP=data=2", "--system", "DDP"), "another system has the name 'DDP'"),
        (("--by-hand", "auto=data=2"), "the automatic plan has the name 'auto'"),
    ],
)
def test_names_of_plans_are_checked_before_anything_is_captured(options: tuple[str, ...], message: str) -> None:
    _, err = run("compare", "factories:there_is_none", "--devices", "cpu,cpu", *options, status=2)
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("factories.py:with_args", "factories:with_args"),
        ("folder/models.py:net", "folder.models:net"),
        ("factories:with_args()", "factories:with_args"),
        ("factories.with_args", "factories:with_args"),
        ("factories.py", "factories:factory"),
        ("factories:with_arg", "factories:with_args"),
        ("factores:with_args", "factories"),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(given: str, meant: str) -> None:
    _, err = run("plan", given, status=2)
    assert meant in err


def test_what_a_factory_prints_does_not_mix_with_the_result() -> None:
    out, _ = run("plan", "factories:talks", "--devices", "cpu", "--json")
    assert Plan.from_json(out).used_devices == ("cpu:0",)


@pytest.mark.parametrize("path", ["no_such_folder/plan.json", ".", "factories.py/plan.json"])
def test_a_path_that_cannot_be_written_is_refused_before_the_search(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopar, "plan", None)
    _, err = run("plan", "factories:with_args", "--save", path, status=2)
    assert err.startswith(f"error: --save {path}: ")
    assert err.count("\n") == 1


def test_a_failure_of_autopar_is_one_line_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("forgotten")

    fails.__code__ = fails.__code__.replace(co_filename=autopar.api.planning.__file__)
    monkeypatch.setattr(autopar, "plan", fails)
    _, err = run("plan", "factories:with_args", "--devices", "cpu", status=1)
    assert err.startswith("error: inside autopar: KeyError: 'forgotten' (planning.py:")
    assert err.count("\n") == 1


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny() -> demo_room.Demo:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
        return demo_room.Demo("tiny", model, {"input": x}, torch.randn(4, 8), nn.functional.mse_loss)

    monkeypatch.setitem(demo_room.DEMOS, "tiny", tiny)


def test_the_demo_plans_reports_and_compares(tiny_demo: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_room, "SYSTEMS", ())
    page = tmp_path / "demo.html"
    text, _ = run("demo", "--model", "tiny", "--html", str(page))
    assert str(page) in text.splitlines()[-1], "it ends with the file to open"
    assert "step measured" in page.read_text()
    for part in ("tiny", "Predicted timeline", "loss", "one device", "max_replicas=1"):
        assert part in text
    out, err = run("demo", "--model", "tiny", "--json", "--html", str(page))
    data = json.loads(out)
    assert [row["name"] for row in data["rows"]] + [*data["same"]] == ["one device", "auto", "max_replicas=1"]
    assert "tiny" in err


@pytest.mark.slow
def test_page_and_terminal_of_the_demo_show_one_value_for_the_measured_step(
    tiny_demo: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_room, "SYSTEMS", ())
    page = tmp_path / "demo.html"
    out, err = run("demo", "--model", "tiny", "--json", "--html", str(page))
    single, auto = json.loads(out)["rows"][:2]
    figures = Page(page.read_text()).figures
    assert figures["step time"][0] == seconds_text(auto["measured"]), "the median of the rounds, not a single step"
    assert figures["speed-up over one device"][0] == f"{auto['speed_up']:.2f}x", "in the same rounds"
    assert seconds_text(single["measured"]) in figures["speed-up over one device"][1]
    for value in (seconds_text(auto["measured"]), milliseconds(auto["measured"])):
        assert value in err


@pytest.mark.slow
def test_the_demo_says_what_it_was_measured_on_and_what_the_machine_gives_at_most(tiny_demo: None) -> None:
    text, _ = run("demo", "--model", "tiny")
    words = " ".join(text.split())
    assert re.search(r"ceiling: \S+ ms, \S+x one device \(2 processes, each with 1/2 of the batch", words)
    assert "measured on 2 x " in words


def test_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, err = run("demo", status=1)
    assert "pip install" in err


@pytest.mark.slow
def test_the_module_runs_as_a_program_with_json_alone_on_stdout() -> None:
    command = [sys.executable, "-m", "autopar", "plan", "factories:with_args", "--devices", "cpu,cpu", "--json"]
    root = Path(autopar.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(done.stdout).devices == ("cpu:0", "cpu:1")


def test_the_version_is_printed() -> None:
    out, _ = run("--version")
    assert out == f"autopar {autopar.__version__}\n"


def test_the_version_is_printed_without_importing_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['autopar', '--version']; "
        "runpy.run_module('autopar', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(autopar.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, f"autopar {autopar.__version__}\n"), done.stderr


@pytest.mark.slow
def test_all_public_names_are_there_and_are_the_calls() -> None:
    code = (
        "import ast, inspect, autopar.plan.plan, autopar; from autopar import *; "
        "tree = ast.parse(inspect.getsource(autopar)); "
        "block = next(node for node in tree.body if isinstance(node, ast.If)); "
        "homes = {alias.name: node.module for node in block.body for alias in node.names}; "
        "assert {*homes, '__version__'} == {*autopar.__all__} <= {*dir(autopar)}; "
        "modules = {name: __import__(home, fromlist=[name]) for name, home in homes.items()}; "
        "assert all(getattr(autopar, n) is getattr(modules[n], n) is globals()[n] for n in homes)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(autopar.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--help"), ("plan",), ("plan", "factories:nonsense")])
def test_help_and_errors_are_plain_text(arguments: tuple[str, ...]) -> None:
    result = CliRunner(env={"NO_COLOR": "1", "FORCE_COLOR": "1"}).invoke(app, arguments, color=True)
    assert "\x1b" not in result.output
