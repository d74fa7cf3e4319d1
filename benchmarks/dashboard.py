"""The dashboard over 100 runs of 100,000 steps in a headless Chromium: first paint, interactions.

Each round begins a server whose cache is empty and a browser with a new profile. First paint is
from the navigation's start until the list has rows and the first run's curves are drawn. An
interaction is from the input event to the frame in which the first chart (of a zoom: the one that
was zoomed) shows it; `all` is until every chart does. A run that nobody looked at before is `new`.
Logs beyond the first `NUM_LOGS` are links to those, for disks are finite.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _logs import write_runs
from run import Measured

NUM_RUNS, NUM_STEPS, NUM_LOGS, ROUNDS, REPEATS = 100, 100_000, 24, 5, 2
FIRST_PAINT_S, INTERACTION_S = 2.0, 0.2
GOAL = "p95 of first paint < 2 s and of every interaction < 0.2 s: share of the goal < 1"
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

SERVER = """
import sys
from pathlib import Path
from diptych.serving import serve
serve([Path(sys.argv[1])], evaluation=None, host="127.0.0.1", port=0, opens_browser=False)
"""

PAINTED = """() => {
    const rows = document.querySelectorAll("#list tbody tr").length;
    if (rows && !window.rowsAt) window.rowsAt = performance.now();
    const plot = document.querySelector(`[id*='"loss"'] .js-plotly-plot`);
    const drawn = plot && plot.calcdata && plot.querySelector(".scatterlayer .trace");
    return drawn && rows ? [window.rowsAt, performance.now()] : null;
}"""

# Whoever draws gives a plot new data; the frame after that is what a person sees.
WATCH = """() => {
    const plots = [...document.querySelectorAll(".js-plotly-plot")].filter((p) => p.data?.length);
    window.seen = {begin: 0, first: null, last: null, num: 0};
    const began = () => { seen.begin = performance.now(); };
    addEventListener("mouseup", began, {once: true, capture: true});
    const before = new Map(plots.map((plot) => [plot, plot.data]));
    const named = (plot) => plot.closest("[id*='figure']").id;
    const look = () => {
        const now = [...document.querySelectorAll(".js-plotly-plot")].filter((p) => p.data?.length);
        const changed = now.filter((plot) => plot.calcdata && before.get(plot) !== plot.data);
        if (seen.begin) {
            for (const plot of changed) {
                before.set(plot, plot.data);
                seen.num += 1;
                seen.last = performance.now();
                if (named(plot).includes(`"${window.first}"`)) seen.first ??= seen.last;
            }
        }
        window.watching = requestAnimationFrame(look);
    };
    cancelAnimationFrame(window.watching);
    look();
}"""


def measure(options: argparse.Namespace) -> Measured:
    """Write the runs, then open the page anew some rounds."""
    with tempfile.TemporaryDirectory(prefix="diptych-dashboard-") as name:
        folder = Path(name)
        write_runs(folder / "runs", num_runs=NUM_RUNS, num_steps=NUM_STEPS, num_logs=NUM_LOGS)
        rounds = [_round(folder, number=number) for number in range(ROUNDS)]
    found: dict[str, list[float]] = {}
    for each in rounds:
        for what, seconds in each.items():
            found.setdefault(what, []).extend(seconds)
    table = {
        what: {"p50": _quantile(values, 0.5), "p95": _quantile(values, 0.95), "n": len(values)}
        for what, values in found.items()
    }
    shares = [
        table[what]["p95"] / (FIRST_PAINT_S if what == "first paint" else INTERACTION_S)
        for what in table
        if what == "first paint" or what.startswith("first chart")
    ]
    return Measured(
        unit="s until the first run's curves are drawn, p50",
        ours=table["first paint"]["p50"],
        peers={what: row["p95"] for what, row in table.items()},
        ratio=max(shares),
        goal=GOAL,
        met=max(shares) < 1,
        raw={"table": table, "rounds": rounds},
    )


def _quantile(values: list[float], share: float) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def _round(folder: Path, *, number: int) -> dict[str, list[float]]:
    shutil.rmtree(folder / "cache", ignore_errors=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    begin = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-u", "-c", SERVER, str(folder / "runs")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert server.stdout is not None, "it is a pipe"
        url = server.stdout.readline().split()[0]
        began_s = time.monotonic() - begin
        return {"server": [began_s], **_browse(url, profile=folder / f"browser-{number}")}
    finally:
        server.terminate()
        server.wait()


def _browse(url: str, *, profile: Path) -> dict[str, list[float]]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch_persistent_context(
            profile,
            executable_path=shutil.which("chromium"),
            args=OPTIONS,
            viewport={"width": 1500, "height": 950},
        )
        try:
            page = browser.new_page()
            page.set_default_timeout(120_000)
            page.goto(url, wait_until="commit")
            rows_ms, curves_ms = page.wait_for_function(PAINTED).json_value()
            found = {"list": [rows_ms / 1000], "first paint": [curves_ms / 1000]}
            time.sleep(3.0)  # all charts are there
            return found | _interact(page)
        finally:
            browser.close()


def _interact(page: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}

    def act(what: str, action: Any, *, first: str) -> None:
        page.evaluate("(first) => { window.first = first; }", first)
        page.evaluate(WATCH)
        action()
        page.wait_for_function("() => seen.first && performance.now() - seen.last > 1000")
        begin, at, last = page.evaluate("() => [seen.begin, seen.first, seen.last]")
        found.setdefault(f"first chart, {what}", []).append((at - begin) / 1000)
        found.setdefault(f"all charts, {what}", []).append((last - begin) / 1000)

    def row(number: int) -> Any:
        return page.locator(f"#list tbody tr:nth-child({number + 1}) td:nth-child(3)")

    for repeat in range(REPEATS):
        act("a new run", row(3 + repeat).click, first="loss")
    page.wait_for_function("() => document.getElementById('status').textContent === ''")
    for repeat in range(REPEATS):
        act("a run seen before", row(3 + repeat).click, first="loss")
        act("zoom", lambda: _drag(page), first="loss")
        act("all again", lambda: _double_click(page), first="loss")
        act("smoothing", page.locator("#smooth label:has-text('101')").click, first="loss")
        act("no smoothing", page.locator("#smooth label:has-text('as it is')").click, first="loss")
        act(
            "other charts", page.locator("#tab label:has-text('Speed')").click, first="tokens_per_s"
        )
        act("back", page.locator("#tab label:has-text('Loss')").click, first="loss")
    act("a second run", page.locator("#list tbody tr:nth-child(9) input").click, first="loss")
    return found


def _box(page: Any) -> tuple[float, float, float]:
    box = page.locator("""[id*='"loss"'] .nsewdrag""").bounding_box()
    return box["x"], box["width"], box["y"] + box["height"] / 2


def _drag(page: Any) -> None:
    left, width, middle = _box(page)
    page.mouse.move(left + 0.3 * width, middle)
    page.mouse.down()
    page.mouse.move(left + 0.6 * width, middle, steps=4)
    page.mouse.up()


def _double_click(page: Any) -> None:
    left, width, middle = _box(page)
    page.mouse.dblclick(left + 0.5 * width, middle)
