"""The page in a real browser, over small runs: chosen, compared, zoomed, live, and nothing else."""

from __future__ import annotations

import shutil
import threading
from urllib.parse import urlsplit

import pytest

from diptych.dashboard.server import listen, make_app
from tests.dashboard.folders import lines, make_desk, make_observed, observed

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 90_000

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    make_observed(folder, "aaaa")
    make_observed(folder, "bbbbb", num_steps=30, moved_s=1.6e9)
    return folder


@pytest.fixture
def url(runs):
    server = listen(make_app(make_desk(runs)), host="127.0.0.1", port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def page(url, tmp_path):
    """Open the page; at the end nothing was complained about, and nobody else was asked."""
    playwright = pytest.importorskip("playwright.sync_api")
    said, asked = [], set()
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch_persistent_context(
            tmp_path / "browser", executable_path=CHROMIUM, args=OPTIONS
        )
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on(
            "console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.add(urlsplit(request.url).hostname))
        page.goto(url)
        try:
            yield page
        finally:
            browser.close()
    assert said == []
    assert asked - {None} == {"127.0.0.1"}


COUNT_POINTS = """(chart) => {
    const plot = document.querySelector(`[id*='"${chart}"'] .js-plotly-plot`);
    if (!plot || !plot.calcdata) return null;
    return Object.fromEntries(plot.data.map((one, n) => [one.name, plot.calcdata[n]?.length]));
}"""


def _wait(page, chart, condition):
    """Wait for what a chart shows, `c` in JavaScript: how many points each curve has, by name."""
    looked = f"(chart) => {{ const c = ({COUNT_POINTS})(chart); return c && ({condition}); }}"
    page.wait_for_function(looked, arg=chart)
    return page.evaluate(COUNT_POINTS, chart)


def test_runs_are_chosen_compared_zoomed_and_followed(page, runs):
    curves = _wait(page, "loss", "c.training === 40")
    assert curves["held-out"] == 4
    _wait(page, "grad_norm_by_tower", "c.vision === 40")

    page.click('#list tr[data-key="0/bbbbb"] input')
    curves = _wait(page, "loss", "c['bbbbb training'] === 30")
    assert curves["aaaa training"] == 40

    plot = page.locator("""[id*='"loss"'] .nsewdrag""")
    box = plot.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=5)
    page.mouse.up()
    zoomed = _wait(page, "loss", "c['aaaa training'] < 20")
    assert zoomed["aaaa training"] > 5
    _wait(page, "grad_norm", "Object.values(c)[0] < 20")

    # What comes while one looks moves nothing that was chosen.
    with (runs / "aaaa" / "steps.jsonl").open("ab") as file:
        file.write(lines([observed(step) for step in range(41, 45)]))
    page.wait_for_selector("text=44/60")
    assert _wait(page, "loss", "true")["aaaa training"] == zoomed["aaaa training"]
    plot.dblclick()
    _wait(page, "loss", "c['aaaa training'] === 44 && c['bbbbb training'] === 30")

    page.click("#tab label:has-text('Speed')")
    _wait(page, "mfu", "c['aaaa MFU'] === 44")
    page.click("#tab label:has-text('Memory and devices')")
    _wait(page, "busy", "c['1'] === 5")
    page.click("#tab label:has-text('Settings and events')")
    page.wait_for_selector("text=identity.seed")
    assert page.locator("#words i").count() == 0
    assert page.locator("text=<i>it</i> stalls").count() == 2
    page.click("#tab label:has-text('Answers')")
    page.wait_for_selector("text=No evaluation of run aaaa was found")
