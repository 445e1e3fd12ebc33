"""What mkdocs does beyond its plugins: pages of files in the root, figures of benchmarks, and no comments for tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
FIGURES = "benchmarks/results"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie in the root, and the figures that benchmarks have drawn."""
    for page, source in FROM_ROOT.items():
        # Links from the root become links from docs/.
        text = (ROOT / source).read_text().replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
        files.append(File.generated(config, page, content=text))
    for figure in sorted((ROOT / FIGURES).glob("*.png")):
        files.append(File.generated(config, f"{FIGURES}/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leave out the comments that are for tests; figures lie beside the pages."""
    markdown = re.sub(r"^<!-- (run first|check)\n.*?^-->\n", "", markdown, flags=re.DOTALL | re.MULTILINE)
    markdown = re.sub(
        r"^<!-- (not run: |run with: |output |test command )[^\n]*-->\n", "", markdown, flags=re.MULTILINE
    )
    return markdown.replace(f"](../{FIGURES}/", f"]({FIGURES}/")
