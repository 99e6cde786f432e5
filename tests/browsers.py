"""A browser for the tests of pages: one on the PATH, or the one that .ci/browser has unpacked."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
UNPACKED = ROOT / ".venv" / "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> tuple[str, dict[str, str]] | None:
    """The program, and the environment it needs; what .ci/browser has unpacked, too."""
    for name in NAMES:
        if found := shutil.which(name):
            return found, {}
    root = UNPACKED / "root"
    program = root / "usr/lib/chromium/chromium"
    if not program.exists():
        return None
    kind = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    inside = ("usr/lib/chromium", f"usr/lib/{kind}", f"lib/{kind}", f"usr/lib/{kind}/pulseaudio")
    libraries = os.pathsep.join(str(root / folder) for folder in inside)
    fonts = str(UNPACKED / "fonts.conf")
    return str(program), {"LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": fonts}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = find_browser()
    if found is None:
        pytest.skip(f"no browser: neither {', '.join(NAMES)} nor what .ci/browser unpacks")
    from playwright.sync_api import sync_playwright

    program, more = found
    environment: dict[str, str | float | bool] = {**os.environ, **more}
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=program, env=environment, args=["--disable-gpu"]
        )
        yield running
        running.close()


@contextmanager
def opened(browser: Any, file: Path, width: int, scheme: str) -> Iterator[Any]:
    """A page with curves in a window; every message of it and every further request is an error."""
    with browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    ) as context:
        tab, said = context.new_page(), []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda asked: said.append(asked.url))
        tab.goto(file.as_uri())
        tab.wait_for_selector(".curve path.line")
        assert said.pop(0) == file.as_uri()
        yield tab
        assert said == []
