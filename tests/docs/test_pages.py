"""README, CONTRIBUTING and docs/: their code runs, their links lead somewhere, and what they name exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import typer
from doc_pages import PAGES, ROOT, Block, blocks_of, commands_in, name_of, on_this_machine, run_page

import autopar
from autopar.cli import app

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
CODE = [block for block in BLOCKS if block.language in ("python", "sh")]
RUN = [page for page in PAGES if any(block.runs for block in blocks_of(page))]

# Pages whose blocks take a second or less altogether; the others run among the slow tests.
QUICK = {"docs/index", "docs/how-to/does-not-capture"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=name_of(p), marks=[] if name_of(p) in QUICK else [pytest.mark.slow]) for p in RUN],
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_all_code_runs_or_says_why_not() -> None:
    """The blocks that are left out are few, and their reasons are printed (pytest -rP)."""
    left_out = [block for block in CODE if block.not_run]
    for block in left_out:
        print(f"{block.place}: {block.not_run}")
    print(f"{len(left_out)} of {len(CODE)} blocks are not run")
    for language, count in Counter(block.language for block in CODE).items():
        without = sum(block.language == language for block in left_out)
        assert without <= count / (10 if language == "python" else 1.5), f"{without} of {count} blocks of {language}"


def test_every_block_says_its_language() -> None:
    """A block without a language, or with a misspelt one, would never be run."""
    known = {"python", "sh", "text", "toml", "json", "mermaid"}
    assert not [block.place for block in BLOCKS if block.language not in known and name_of(block.page) != ARCHITECTURE]


ARCHITECTURE = "docs/architecture"  # its drawings have no language


@pytest.mark.parametrize("block", [b for b in CODE if b.language == "python"], ids=lambda block: block.place)
def test_a_block_of_python_names_what_exists(block: Block) -> None:
    """Also in blocks that are not run: they parse, and `autopar.NAME` is a public name."""
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "autopar":
            assert node.attr in autopar.__all__ or node.attr == "integrations", f"{block.place}: autopar.{node.attr}"


def _commands() -> list[tuple[str, list[str]]]:
    """(place, words) of every `autopar` command, in blocks and within lines."""
    found = [(block.place, words) for block in CODE if block.language == "sh" for words in commands_in(block.code)]
    for page in PAGES:
        found += [(name_of(page), text.split()) for text in re.findall(r"`(autopar [^`]+)`", page.read_text())]
    return [(place, words) for place, words in found if words[0] == "autopar" and words[1][0] not in "-<:"]


def test_commands_have_the_options_that_pages_give_them() -> None:
    group = typer.main.get_command(app)
    for place, words in _commands():
        for name in words[1].split("|"):
            command = group.commands.get(name)  # type: ignore[attr-defined]
            if name == "COMMAND":
                continue
            assert command is not None, f"{place}: autopar {name}"
            known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
            for word in words[2:]:
                option = word.strip("[]").partition("=")[0]
                assert not option.startswith("--") or option in known, f"{place}: autopar {name} {option}"


def test_links_lead_to_pages_and_headings() -> None:
    """On GitHub as on the site: files that exist, and headings that they have."""
    problems = []
    for page in PAGES:
        text = re.sub(r"```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, heading = target.partition("#")
            if "://" in path:
                continue
            file = (page.parent / path).resolve() if path else page
            if path in MADE:
                continue
            if not file.exists():
                problems.append(f"{name_of(page)}: {target}")
            elif heading and heading not in _anchors(file):
                problems.append(f"{name_of(page)}: {target} (no such heading)")
    assert not problems


def test_files_that_pages_name_exist() -> None:
    """Also in the reasons why a block is not run, which name the test that covers it."""
    name = re.compile(r"(?<![\w/.])((?:tests|examples|autopar|cost_models|benchmarks|docs)/[\w/.-]+\w/?)(?![\w*])")
    missing = [
        f"{name_of(page)}: {path}"
        for page in PAGES
        for path in name.findall(re.sub(r"\]\([^)]*\)", "", page.read_text()))
        if not (ROOT / path).exists()
    ]
    assert not missing


MADE = {"contributing.md", "changelog.md"}  # docs/hooks.py makes them of files in the root


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.slow
def test_python_blocks_have_the_projects_format(tmp_path: Path) -> None:
    pytest.importorskip("ruff", reason='this needs ruff: pip install "autopar[dev]"')
    for number, block in enumerate(block for block in CODE if block.language == "python"):
        name = block.place.replace("/", "_").replace(":", "_")
        (tmp_path / f"{number}_{name}.py").write_text(block.shown)
    options = ["format", "--diff", "--line-length", "120", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "ruff", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_site_builds_without_a_network(tmp_path: Path) -> None:
    """Strictly: no link, heading or page is missing. Pages load nothing from elsewhere."""
    pytest.importorskip("mkdocs", reason='the site needs mkdocs: pip install "autopar[docs]"')
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES) - 2
    loads = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc=["']?https?:|<link[^>]*stylesheet[^>]*href=["']?https?:""")
    for page in pages:
        text = page.read_text()
        assert not loads.search(text), f"{page.name} loads from the network: {loads.search(text)}"
        assert "<!-- run first" not in text, f"{page.name} shows what readers need not see"


# -- the reading of pages ---------------------------------------------------------------------------------------------

PAGE = """# A page

<!-- run first
x = 1
-->

```python
y = x + int("1")
print("cuda:0")
```

<!-- check
assert y == 2
assert printed == "cpu\\n"
-->

<!-- run with: 4 => 5; six => 6 -->
```python
assert 4 + 1 == six
```

<!-- not run: needs a cluster -->
```python
raise AssertionError
```

<!-- output -->
```text
cpu
```

```python title="module.py"
found = 3
```

```sh
python -c "import module; assert module.found == 3; print('done')"  # a comment
```
"""


def test_blocks_are_found_with_their_lines_and_marks(tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "README.md", PAGE)
    assert [(b.language, b.line, b.not_run, b.title) for b in blocks] == [
        ("python", 4, "", ""),
        ("python", 8, "", ""),
        ("python", 13, "", ""),
        ("python", 19, "", ""),
        ("python", 24, "needs a cluster", ""),
        ("text", 29, "", ""),
        ("python", 33, "", "module.py"),
        ("sh", 37, "", ""),
    ]
    assert on_this_machine(blocks[1].code).endswith('print("cpu")\n')


def test_a_page_runs_in_order_in_one_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert run_page(page) == "cpu\ndone\n"
    page.write_text(PAGE.replace("y == 2", "y == 3"))
    with pytest.raises(AssertionError):
        run_page(page)
    page.write_text(PAGE.replace("```text\ncpu", "```text\ngpu"))
    with pytest.raises(pytest.fail.Exception, match="is not printed by the blocks before it, which print:\ncpu"):
        run_page(page)
    page.write_text(PAGE.replace("found == 3", "found == 4"))
    with pytest.raises(pytest.fail.Exception, match="exits with 1"):
        run_page(page)
