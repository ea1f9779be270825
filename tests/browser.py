"""A headless Chromium: what a page has become after its script ran, at a given width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["browser", "inspect"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# The page stands in a frame of the wanted width, so that its own policy holds and its document can
# be read. The outer document has loaded when the frame has, with what was found in it as JSON.
_OUTER = """<!doctype html><meta charset="utf-8"><body style="margin:0"><script>
const frame = document.createElement("iframe");
frame.style.cssText = "width:WIDTHpx;height:900px;border:0";
const started = performance.now();
frame.onload = () => {
  const inner = frame.contentDocument, win = frame.contentWindow, root = inner.documentElement;
  const width = root.scrollWidth, opened_ms = performance.now() - started;
  const out = document.createElement("pre");
  out.id = "found";
  try {
    const found = (PROBE)(inner, win);
    const requests = win.performance.getEntriesByType("resource").map((e) => e.name);
    const ready = root.dataset.ready;
    out.textContent = JSON.stringify({ opened_ms, width, ready, requests, found });
  } catch (error) {
    out.textContent = JSON.stringify({ error: String(error.stack) });
  }
  document.body.append(out);
};
frame.srcdoc = PAGE;
document.body.append(frame);
</script>"""


def browser() -> str | None:
    """The program of an installed Chromium; None if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def inspect(page: str, width: int = 1280, probe: str = "() => null") -> dict[str, Any]:
    """Open a page and look at it.

    Args:
        page: HTML text.
        width: of the window.
        probe: JavaScript function of `(document, window)` whose result is `found`.

    Returns:
        `opened_ms` from setting the page until it is drawn and laid out, `width` of its content,
        `ready`, `requests` and `found`.
    """
    program = browser()
    assert program is not None
    text = json.dumps(page).replace("<", "\\u003c")
    outer = _OUTER.replace("WIDTH", str(width)).replace("PROBE", probe).replace("PAGE", text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outer.html"
        path.write_text(outer, encoding="utf-8")
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={folder}/profile",
            f"--window-size={width + 40},1000",
            "--dump-dom",
            path.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    assert "error" not in found, found["error"]
    return found
