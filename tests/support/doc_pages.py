"""The code of README, CONTRIBUTING and docs/: which blocks there are, and how a page's blocks are run in order.

A page marks its blocks with HTML comments, which readers do not see:

    <!-- run first ... -->      code that runs where it stands: names that the next blocks need
    <!-- check ... -->          code that runs where it stands: checks; `printed` is the page's output so far
    <!-- not run: REASON -->    the next block is left out
    <!-- output -->             the next block, of text, is what the blocks before it print
    <!-- run with: A => B; C => D -->   in the next block the tests write B for A and D for C: a smaller cluster

Blocks of Python and of commands (sh) run; a Python block with a title is a file of that name.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

_PIECE = re.compile(
    r"^<!-- (?P<comment>run first|check)\n(?P<hidden>.*?)^-->$"
    r"|^<!-- (?P<remark>[^\n]*?) -->$"
    r"|^(?P<fence>`{3,})(?P<language>\w*)(?P<attributes>[^\n`]*)\n(?P<shown>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN, _RUN_WITH = "not run: ", "run with: "
_REASONS = {"test command": "runs the tests"}  # remarks that other programs read


@dataclass(frozen=True)
class Block:
    """A piece of code of a page."""

    page: Path
    line: int  # of its first line of code, from 1
    language: str  # "python", "sh" or another
    code: str
    title: str = ""  # the name of the file that it is
    not_run: str = ""  # the reason why it is left out
    is_output: bool = False  # whether the blocks before it print it
    shown: str = ""  # the code as it stands in the page; `code` may be smaller

    @property
    def place(self) -> str:
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and not self.not_run


def name_of(page: Path) -> str:
    """How tests name a page."""
    return str(page.relative_to(ROOT).with_suffix(""))


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """The pieces of code of a page, in order, hidden ones among them."""
    text = page.read_text() if text is None else text
    found: list[Block] = []
    remark, end_of_remark = "", 0
    for match in _PIECE.finditer(text):
        if match["remark"] is not None:
            remark, end_of_remark = match["remark"], match.end()
            continue
        if text[end_of_remark : match.start()].strip():
            remark = ""  # it was about another block
        reason = _REASONS.get(remark, remark.removeprefix(_NOT_RUN) if remark.startswith(_NOT_RUN) else "")
        hidden = match["comment"] is not None
        start = match.start("hidden" if hidden else "shown")
        title = re.search(r'title="([^"]*)"', match["attributes"] or "")
        written = code = match["hidden"] if hidden else match["shown"]
        if remark.startswith(_RUN_WITH):
            for replacement in remark.removeprefix(_RUN_WITH).split("; "):
                shown, _, instead = replacement.partition(" => ")
                assert shown in code, f"{page}: {shown!r} is not in the block after the remark"
                code = code.replace(shown, instead)
        found.append(
            Block(
                page,
                text.count("\n", 0, start) + 1,
                "python" if hidden else match["language"],
                code,
                title[1] if title else "",
                reason,
                remark == "output",
                written,
            )
        )
        remark = ""
    return found


def on_this_machine(code: str) -> str:
    """The code with workers of the CPU in place of GPUs."""
    return re.sub(r"cuda:\d", "cpu", code)


def run_page(page: Path) -> str:
    """Run the blocks of a page in the current directory, which should be empty. The output of all; raises what they do.

    A file of the repository that a command names is taken from there.
    """
    names: dict[str, Any] = {"__name__": "page", "Path": Path}
    printed = io.StringIO()
    for block in blocks_of(page):
        if block.is_output and block.code not in printed.getvalue():
            pytest.fail(f"{block.place} is not printed by the blocks before it, which print:\n{printed.getvalue()}")
        if not block.runs:
            continue
        code = on_this_machine(block.code)
        if block.title:
            Path(block.title).write_text(code)
            sys.modules.pop(Path(block.title).stem, None)  # another page's file of this name
        elif block.language == "python":
            names["printed"] = printed.getvalue()
            # Empty lines ahead, so that a traceback has the lines of the page.
            compiled = compile("\n" * (block.line - 1) + code, str(page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(compiled, names)
        else:
            for command in commands_in(code):
                printed.write(_run_command(command, block))
    return printed.getvalue()


def commands_in(code: str) -> Iterator[list[str]]:
    """The commands of a block of sh, comments left out."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def _run_command(words: list[str], block: Block) -> str:
    if words[0] == "autopar":
        result = CliRunner().invoke(app, words[1:])
        if result.exit_code:
            pytest.fail(f"{block.place}: {shlex.join(words)} exits with {result.exit_code}:\n{result.output}")
        return result.stdout
    if words[0] == "python":
        words = [sys.executable, *words[1:]]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment, check=False)
    if done.returncode:
        pytest.fail(f"{block.place}: {shlex.join(words)} exits with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
