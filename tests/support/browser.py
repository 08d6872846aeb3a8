"""Opens a page in a headless Chromium, where there is one, and gives back what became of it."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
# Every one of these keeps it from doing more than draw the page: no network, no first-run pages.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=8000", "--dump-dom",
)  # fmt: skip
LIMIT_S = 90


@dataclass(frozen=True)
class Opened:
    """A page after its script has run."""

    dom: str
    console: list[str]
    """What the page wrote to the console, and errors of its own."""

    def text(self) -> str:
        """What is to be read on it."""
        body = re.sub(r"<(script|style)\b.*?</\1>", "", self.dom, flags=re.DOTALL)
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())

    def attribute(self, name: str) -> str | None:
        """An attribute of the root element."""
        found = re.search(rf'<html[^>]*\b{name}="([^"]*)"', self.dom)
        return unescape(found.group(1)) if found else None


def open_page(path: Path, profile: Path, width: int = 1280, height: int = 720) -> Opened:
    """Open a file with a fresh profile; raises where the browser does not end in time."""
    assert CHROMIUM is not None, "skip the test where there is no browser"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
    done = subprocess.run(
        [*command, path.as_uri()], check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Opened(done.stdout, console)
