"""Pages in a real browser without a network: headless Chromium, and what its rendered DOM holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest


def browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        said = "Chromium is missing: sh scripts/packages.sh installs it as root (apt-get install chromium)"
        (pytest.fail if os.getuid() == 0 else pytest.skip)(said)
    return found


def opened(path: Path, *more: str) -> tuple[str, str]:
    """The page's DOM after its scripts have run, and what the browser's console said. There is no network for it."""
    command = [
        browser(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        f"--user-data-dir={path.parent / 'profile'}",
        "--proxy-server=127.0.0.1:9",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--window-size=1400,2400",
        "--virtual-time-budget=2000",
        *more,
        "--dump-dom",
        path.absolute().as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


class Dom(HTMLParser):
    """What the tests ask of a rendered page: text by element id, marks drawn by chart, everything that could load something."""

    VOID = {"meta", "link", "br", "img", "input", "hr", "base", "source"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, str] = {}  # by id of an open element
        self.marks: dict[tuple[str, str], list[dict[str, str]]] = {}  # by (id of the chart, class around it): attributes
        self.loads: list[str] = []
        self.tags: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = {key: value or "" for key, value in attrs}
        self.tags[tag] += 1
        self.loads += [given[key] for key in ("src", "href", "xlink:href", "data", "srcset") if key in given]
        self.loads += re.findall(r"url\(([^)]*)\)", given.get("style", ""))
        if tag in ("path", "rect"):
            chart = next((other["id"] for _, other in self.open if other.get("id", "").endswith("-chart")), None)
            for _, other in [*self.open, (tag, given)]:
                for name in other.get("class", "").split():
                    self.marks.setdefault((chart, name), []).append(given)
        if tag not in self.VOID:
            self.open.append((tag, given))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, given in self.open:
            if "id" in given:
                self.text[given["id"]] = self.text.get(given["id"], "") + data

    def bars(self, chart: str) -> list[tuple[float, float]]:
        """Left and right end of each bar, in pixels."""
        found = [re.match(r"M([\d.]+),[-\d.]+V[-\d.]+H([\d.]+)V", mark["d"]) for mark in self.marks.get((chart, "barlayer"), [])]
        return [(float(each[1]), float(each[2])) for each in found if each]

    def scale(self, chart: str) -> tuple[float, float]:
        """Left end and width of the plot, in pixels."""
        (back,) = self.marks[chart, "nsewdrag"]
        return float(back["x"]), float(back["width"])
