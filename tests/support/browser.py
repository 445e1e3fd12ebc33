"""Pages in headless Chromium: what it says on its console, and how wide they are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_MEASURING = """<!doctype html><body style="margin:0">
<iframe id="page" style="border:0;width:{width}px;height:900px" src="{page}"></iframe>
<pre id="found"></pre>
<script>
window.addEventListener("load", () => {{
  const inside = document.getElementById("page").contentDocument, root = inside.documentElement;
  for (const one of inside.querySelectorAll("details")) one.open = {unfolded};
  const wide = [...inside.querySelectorAll(".autopar-report *")].filter((one) =>
    one.getBoundingClientRect().right > {width} + 1 && !one.closest(".scroll") && !one.closest(".hidden"));
  const scrolling = [...inside.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth + 1);
  const broken = [];
  for (const cell of inside.querySelectorAll("td, tbody th")) {{
    const texts = inside.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node = texts.nextNode(); node; node = texts.nextNode()) {{
      for (const word of node.data.matchAll(/[^\\s/-]+/g)) {{
        const range = inside.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size > 1) broken.push(word[0]);
      }}
    }}
  }}
  const style = inside.defaultView.getComputedStyle(inside.querySelector(".autopar-report"));
  document.getElementById("found").textContent = JSON.stringify({{
    width: root.scrollWidth, height: root.scrollHeight, background: style.backgroundColor,
    broken: broken.slice(0, 5),
    scrolling: scrolling.map((one) => inside.defaultView.getComputedStyle(one).backgroundAttachment),
    wide: wide.slice(0, 5).map((one) => one.tagName + "." + one.className),
  }});
}});
</script>"""


def browser() -> str | None:
    """The program; None where there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def shown(page: Path, width: int, *, dark: bool = False, unfolded: bool = True) -> dict[str, object]:
    """What a page of `width` pixels is like: its scroll width and height, its background, elements that stick out,
    words of tables that are broken, the backgrounds of what scrolls sideways, and `console`, the messages of the
    browser's console."""
    program = browser()
    assert program is not None
    frame = page.with_suffix(f".{width}.html")
    frame.write_text(_MEASURING.format(width=width, page=page.as_uri(), unfolded=json.dumps(unfolded)))
    done = subprocess.run(
        [
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
            *(f"--user-data-dir={page.parent / 'browser'}", "--enable-logging=stderr", "--window-size=1600,1000"),
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
            *("--virtual-time-budget=5000", "--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    found: dict[str, object] = json.loads(match[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    return {**found, "console": [line for line in done.stderr.splitlines() if ":CONSOLE" in line]}
