"""The page as a browser would read it: offline, escaped, honest about what was not measured."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from diptych.core.records import Alert, ContrastSpec, Over, Parent
from diptych.monitor.run_folder import RunFolder
from diptych.report.examples import pick
from diptych.report.lineage import trace
from diptych.report.page import RUN_STARTED, draw, summarise
from diptych.shape.attention import Choice

from .conftest import HASHES, MARKUP, Finished
from .logs import rewrite

VOID = {"meta", "img", "link", "br", "input", "hr"}


class Page(HTMLParser):
    """Collects tags with their attributes, and the text outside and inside scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] == "script":
            attributes, text = self.scripts.pop()
            self.scripts.append((attributes, text + data))
        elif not self._inside or self._inside[-1] != "style":
            self.text += data


def render(finished: Finished, **changes: object) -> Page:
    parts = {**vars(finished), **changes}
    lineage = trace(
        *(
            parts[name]
            for name in (
                "raw_samples",
                "manifest",
                "model_shape",
                "run_spec",
                "run",
                "parity",
                "scores",
            )
        )
    )
    summary = summarise(
        *(parts[name] for name in ("run", "manifest", "parity", "scores", "release"))
    )
    examples = pick(parts["predictions"], parts["manifest"], parts["shards"])
    return Page(
        draw(
            summary,
            lineage,
            parts["plan"],
            parts["scores"],
            examples,
            parts["manifest"],
            parts["sample_costs"],
            parts["data_section"],
        )
    )


@pytest.fixture
def page(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.delenv(RUN_STARTED, raising=False)
    return render(finished)


def test_page_loads_nothing(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base"}
        assert "srcset" not in attributes
        if "src" in attributes:
            assert tag == "img"
            assert (attributes["src"] or "").startswith("data:image/")
        if "href" in attributes:
            assert tag == "a"
            assert (attributes["href"] or "").startswith("#")


def test_policy_allows_only_the_scripts_of_the_page(page: Page) -> None:
    policy = next(
        attributes["content"] or ""
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    directives = dict(part.split(maxsplit=1) for part in policy.split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["img-src"] == "data:"
    run = [text for attributes, text in page.scripts if not attributes.get("type")]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run]
    assert directives["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    # A browser hashes the script after turning CRLF into LF: there must be none to turn.
    assert not any("\r" in text for text in run)


def test_text_of_samples_is_escaped(page: Page) -> None:
    assert page.text.count(MARKUP) == 1, "as a question"
    inert = [attributes for attributes, _ in page.scripts if attributes.get("type")]
    assert len(page.scripts) - len(inert) == 2, "plotly and show.js, nothing from a sample"
    assert not any(text == "bold" for tag, text in page.tags if tag == "b")


def test_every_figure_has_its_numbers_and_a_description(page: Page) -> None:
    places = {
        attributes["data-figure"]: attributes
        for _, attributes in page.tags
        if "data-figure" in attributes
    }
    numbers = {
        attributes["id"]: json.loads(text)
        for attributes, text in page.scripts
        if attributes.get("type") == "application/json"
    }
    assert set(places) == set(numbers)
    assert len(places) == 8
    for name, attributes in places.items():
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"] or "") > 15
        assert numbers[name]["data"], f"{name} shows nothing"


def test_images_have_descriptions_and_their_own_bytes(page: Page, finished: Finished) -> None:
    tar = (finished.shards / "heldout" / "starter-000000.tar").read_bytes()
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) > 10
    for attributes in images:
        data = base64.b64decode((attributes["src"] or "").partition("base64,")[2])
        assert data in tar
        assert attributes["alt"]


def test_numbers_of_the_run_are_on_the_page(page: Page, finished: Finished) -> None:
    for expected in (
        "96.3%",
        "3.1%",
        "2.9e-6",
        "1.46 M",
        finished.manifest.sha256,
        HASHES["processor"],
        HASHES["release"],
        finished.run_spec.identity.sha256,
        "good run",
        "bf16 is emulated on this CPU",
        "THE DATA'S OWN SECTION",
        "with uncommitted changes",
    ):
        assert expected in page.text


def test_what_trained_is_a_table(page: Page, finished: Finished) -> None:
    _, _, table = page.text.partition("What trained")
    # The text of cells, one after another.
    assert "vision1234,567frozen" in table
    assert "language1234,567adamw0.001250.05" in table
    RunFolder(Path(finished.run.folder)).trains.unlink()
    assert "What trained" not in render(finished).text


def test_several_sources_are_told_apart(finished: Finished) -> None:
    shard = finished.manifest.shards[0].model_copy(update={"source": "web"})
    manifest = finished.manifest.model_copy(update={"shards": (*finished.manifest.shards, shard)})
    costs = json.loads((finished.sample_costs / "costs.json").read_text())
    text = json.dumps(costs | {"manifest_sha256": manifest.sha256})
    (finished.sample_costs / "costs.json").write_text(text, encoding="utf-8")
    folder = Path(finished.run.folder)
    lines = [
        record.model_copy(update={"loss_by_source": {"starter": 0.25, "web": 0.5}})
        for record in RunFolder(folder).read_steps()
    ]
    (folder / "steps.jsonl").write_text("".join(each.model_dump_json() + "\n" for each in lines))
    exact = finished.scores.exact_match
    scores = finished.scores.model_copy(
        update={"exact_match_by_source": {"starter": exact["read"], "web": exact["count"]}}
    )
    page = render(finished, manifest=manifest, scores=scores)
    numbers = {attributes.get("id"): text for attributes, text in page.scripts}
    figure = json.loads(numbers["figure-source_loss"])
    assert [trace["name"] for trace in figure["data"]] == ["starter", "web"]
    assert "Per source" in page.text


def test_two_losses_have_two_curves(finished: Finished) -> None:
    assert "loss/vision" not in render(finished).text
    identity = finished.run_spec.identity.model_copy(update={"contrast": ContrastSpec()})
    spec = finished.run_spec.model_copy(update={"identity": identity})
    folder = Path(finished.run.folder)
    lines = [
        record.model_copy(update={"vision_loss": 2.0}) for record in RunFolder(folder).read_steps()
    ]
    (folder / "steps.jsonl").write_text("".join(each.model_dump_json() + "\n" for each in lines))
    page = render(finished, run_spec=spec)
    numbers = {attributes.get("id"): text for attributes, text in page.scripts}
    figure = json.loads(numbers["figure-vision_loss"])
    assert figure["data"][0]["name"] == "loss/vision"
    assert "Contrastive loss (loss/vision)" in page.text


def test_what_computed_attention_is_said_where_it_changed(finished: Finished) -> None:
    folder = RunFolder(Path(finished.run.folder))
    chosen = Choice("flex", "for rows that hold several samples", {"flash_2": "not installed"})
    folder.append_attempt({"started_s": time.time(), "attention": asdict(chosen)})
    text = render(finished).text
    assert text.count("attention by sdpa") == 1, "the first two attempts have the same"
    _, _, last = text.partition("attention by flex")
    assert "for rows that hold several samples; not flash_2: not installed" in last


def test_sections_are_in_the_order_of_the_contents(page: Page) -> None:
    anchors = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    sections = [
        f"#{attributes['id']}"
        for tag, attributes in page.tags
        if tag == "section" and "id" in attributes
    ]
    assert anchors == sections
    assert anchors == [
        "#curves",
        "#phases",
        "#plan",
        "#data",
        "#scores",
        "#examples",
        "#faults",
        "#decisions",
        "#lineage",
    ]
    assert page.text.index("good run") < page.text.index("steps logged"), "the verdict is first"
    # Each with its number: phases, memory, faults.
    for remark in (
        "42.9% backward",
        "152.0 MiB, 20% below",
        "1 restart",
        "every link holds",
    ):
        assert remark in page.text


def test_what_happened_is_told(page: Page) -> None:
    text = " ".join(page.text.split())
    for expected in (
        "20% less than the 190.0 MiB of the plan",
        "stopped on request, after a checkpoint",
        "training began 2026-02-02 02:40:00 UTC",
        "asked for plan.layout.micro_batch 8",
        "changed keep_checkpoints: 2 → 3",
        "rank 1 in 100% of the steps",
        "nothing else went wrong",
    ):
        assert expected in text


def test_text_of_the_run_s_files_is_escaped(finished: Finished) -> None:
    folder = RunFolder(Path(finished.run.folder))
    said = {"state": "failed", "error": MARKUP}
    folder.append_attempt({"changes": [MARKUP], "passed_over": [MARKUP], "former": said})
    lines = [
        Alert(time_s=2.0, step=3, attempt=0, kind="disk", text=MARKUP).model_dump_json(),
        Alert(time_s=2.5, step=3, attempt=0, kind="nan", text=MARKUP).model_dump_json(),
    ]
    folder.alerts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder.path / "masked-0.jsonl").write_text(json.dumps({"step": 1, "key": MARKUP}) + "\n")
    page = render(finished)
    # A question, a change, a key; as fault and as decision two alerts, a checkpoint, an ending.
    assert page.text.count(MARKUP) == 3 + 2 * 4
    assert len([each for each, _ in page.scripts if not each.get("type")]) == 2
    assert "b" not in [tag for tag, attributes in page.tags if not attributes]


def test_a_forked_run_s_chain_has_its_parent(page: Page, finished: Finished) -> None:
    parent = Parent(run_id="0123456789ab", step=7, sha256="f" * 64)
    identity = finished.run_spec.identity.model_copy(update={"parent": parent})
    spec = finished.run_spec.model_copy(update={"identity": identity})
    text = render(finished, run_spec=spec).text
    assert "checkpoint of run 0123456789ab" in text
    assert "step 7, which this run was forked from" in text
    assert "which this run was forked from" not in page.text


def test_unmeasured_is_said_and_never_zero(page: Page, finished: Finished) -> None:
    assert page.text.count("not measured") == 1, "only the run's time, DIPTYCH_RUN_STARTED is unset"
    run = finished.run.model_copy(
        update={"final_heldout_loss": None, "final_loss": None, "folder": "absent"}
    )
    scores = finished.scores.model_copy(update={"blind_exact_match": {}})
    bare = render(finished, run=run, scores=scores)
    assert bare.text.count("not measured") > 5
    assert "the step log is empty" in bare.text.lower()
    shown = [attributes["id"] for attributes, _ in bare.scripts if attributes.get("type")]
    assert shown == ["figure-scores"], "no axes without a curve"


def test_summary(finished: Finished, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RUN_STARTED, str(time.time() - 90))
    RunFolder(tmp_path).append_attempt({"started_s": time.time() - 60})
    run = finished.run.model_copy(update={"folder": str(tmp_path)})
    parts = (finished.manifest, finished.parity, finished.scores, finished.release)
    summary = summarise(run, *parts)
    assert summary.read_exact_match == 0.963
    assert summary.blind_read_exact_match == 0.031
    assert summary.read_exact_match_low == finished.scores.exact_match["read"].low
    assert summary.parity_max_abs == 2.9e-6
    assert summary.num_steps == 120
    assert summary.final_loss == 0.0412
    assert 90 <= (summary.run_s or 0) < 120
    assert summary.manifest_sha256 == finished.manifest.sha256
    assert summary.exact_match == finished.scores.exact_match["all"].value
    # A later run that trains nothing has not taken the whole run's time.
    monkeypatch.setenv(RUN_STARTED, str(time.time() - 30))
    assert summarise(run, *parts).run_s is None


def test_summary_leaves_out_what_was_not_measured(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN_STARTED, raising=False)
    scores = finished.scores.model_copy(update={"exact_match": {}, "blind_exact_match": {}})
    summary = summarise(finished.run, finished.manifest, finished.parity, scores, finished.release)
    assert summary.run_s is None
    assert summary.read_exact_match is None
    assert summary.blind_read_exact_match is None


def test_import_is_light() -> None:
    code = (
        "import sys, diptych.report.page, diptych.report.examples;"
        "heavy = 'torch', 'transformers', 'plotly', 'pandas', 'kedro';"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_it_says_why_the_run_was_as_fast_as_it_was(finished: Finished) -> None:
    # Half of each step's time is spent waiting for a batch.
    phases = {"data": Over(0.5, 0.5, 0.5, 0), "forward": Over(0.5, 0.5, 0.5, 0)}
    rewrite(Path(finished.run.folder), phases_s=phases)
    page = render(finished)
    assert "Ranks wait for batches, which costs 50% of the time." in page.text
    assert "train.num_workers=" in page.text
    assert "Why it was not faster" in page.text
