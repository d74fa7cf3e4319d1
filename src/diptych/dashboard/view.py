"""What a page shows: what it asks for in, figures, words and lines of runs out.

Knows no browser and no Dash, so that what is shown can be asked for in a test.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from diptych.core.records import RunRow
from diptych.core.terminal import plain
from diptych.core.units import format_count
from diptych.dashboard.answers import Answer, Evaluation, read_answers
from diptych.dashboard.charts import Axis, Chart, charts_of
from diptych.dashboard.facts import Words, compare_settings, list_alerts, list_attempts
from diptych.dashboard.figures import Figure, Shown, draw
from diptych.dashboard.runs import Runs, nodes_of, read_alerts
from diptych.dashboard.wanted import Wanted
from diptych.monitor.run_folder import RunFolder


@dataclass(frozen=True)
class Drawn:
    """One chart as it stands on the page; no figure where nothing of it was measured."""

    chart: Chart
    figure: Figure | None


@dataclass(frozen=True)
class Told:
    """What a tab tells in words."""

    tables: tuple[Words, ...] = ()
    answers: tuple[Answer, ...] = ()
    note: str = ""


@dataclass
class Desk:
    """Runs and an evaluation, and what is shown of them."""

    runs: Runs
    evaluation: Evaluation | None = None

    def draw(self, wanted: Wanted, *, names: Collection[str] | None = None) -> list[Drawn]:
        """Draw the tab's charts, or some of them by name, in order."""
        chosen = self._chosen(wanted)
        found: dict[Axis, list[Shown]] = {"steps": [], "clock": []}
        focus = self._focus(wanted, chosen=chosen)
        for key, folder in chosen.items():
            color = next(each.color for each in wanted.chosen if each.key == key)
            steps, _ = self.runs.steps(folder)
            alerts = read_alerts(folder) if wanted.tab == "loss" else ()
            found["steps"].append(Shown(folder.path.name, color, steps, alerts))
        if focus and wanted.tab == "devices":
            samples, _ = self.runs.samples(chosen[focus], node=self.node(wanted))
            found["clock"].append(Shown(chosen[focus].path.name, 0, samples))
        if focus:
            found["steps"].sort(key=lambda each: each.name != chosen[focus].path.name)
        return [
            Drawn(chart, draw(chart, found[chart.axis], look=wanted.look(chart.axis)))
            for chart in charts_of(wanted.tab)
            if names is None or chart.name in names
        ]

    def tell(self, wanted: Wanted) -> Told:
        """Say what the tab has to say in words."""
        chosen = self._chosen(wanted)
        if not chosen:
            return Told(note="Choose a run in the list.")
        if wanted.tab == "settings":
            named = {folder.path.name: folder for folder in chosen.values()}
            return Told((list_alerts(named), list_attempts(named), compare_settings(named)))
        if wanted.tab == "answers":
            run_id = chosen[self._focus(wanted, chosen=chosen) or next(iter(chosen))].path.name
            answers = read_answers(self.evaluation, run_id=run_id)
            none = f"No evaluation of run {run_id} was found: run kedro run --pipelines=evaluate"
            return Told(answers=tuple(answers), note="" if answers else none)
        return Told()

    def word(self, wanted: Wanted) -> str:
        """Return a word that changes when something that the page shows has."""
        chosen = self._chosen(wanted)
        words = [f"{key} {self.runs.steps(folder)[1]}" for key, folder in chosen.items()]
        focus, node = self.focus(wanted), self.node(wanted)
        if focus:
            words.append(f"{focus} {node} {self.runs.samples(chosen[focus], node=node)[1]}")
        for folder in chosen.values():
            words += [_size(folder.alerts), _size(folder.attempts)]
        return "; ".join(words)

    def status(self, wanted: Wanted) -> str:
        """Say what of the chosen runs is not shown in full yet."""
        chosen = self._chosen(wanted).values()
        partly = [
            folder.path.name
            for folder in chosen
            if self.runs.steps(folder)[1].startswith("preview")
        ]
        names = ", ".join(partly)
        return f"{names}: some steps of many, until all are read" if partly else ""

    def focus(self, wanted: Wanted) -> str | None:
        """Return the key of the run that is shown alone: the one asked for, else the first."""
        return self._focus(wanted, chosen=self._chosen(wanted))

    def nodes(self, wanted: Wanted) -> list[str]:
        """Return the names of the focused run's nodes, where the tab shows one."""
        chosen = self._chosen(wanted)
        focus = self._focus(wanted, chosen=chosen)
        return nodes_of(chosen[focus]) if focus and wanted.tab == "devices" else []

    def node(self, wanted: Wanted) -> str | None:
        """Return the node that is shown: the one asked for, else the first."""
        nodes = self.nodes(wanted)
        return wanted.node if wanted.node in nodes else next(iter(nodes), None)

    def lines(self) -> list[dict[str, Any]]:
        """Return every run as a line of the list."""
        return [_line(key, row) for key, row in self.runs.rows().items()]

    def problems(self) -> list[str]:
        """Return what is wrong with runs, in a line each."""
        return [
            plain(f"{row.run_id} is {row.state}: {row.problem}")
            for row in self.runs.rows().values()
            if row.problem
        ]

    def _chosen(self, wanted: Wanted) -> dict[str, RunFolder]:
        found = {each.key: self.runs.find(each.key) for each in wanted.chosen}
        return {key: folder for key, folder in found.items() if folder is not None}

    def _focus(self, wanted: Wanted, *, chosen: dict[str, RunFolder]) -> str | None:
        return wanted.focus if wanted.focus in chosen else next(iter(chosen), None)


def _line(key: str, row: RunRow) -> dict[str, Any]:
    """Make a line of numbers and plain text; the page writes them out."""
    where = " ".join(filter(None, (row.kind, row.job_id, row.host)))
    return {
        "key": key,
        "run": plain(f"{row.stage}/{row.run_id}" if row.stage else row.run_id),
        "state": row.state,
        "step": row.step,
        "num_steps": row.num_steps,
        "loss": row.loss,
        "heldout": row.heldout_loss,
        "rate": row.tokens_per_s,
        "rate_text": None if row.tokens_per_s is None else format_count(row.tokens_per_s),
        "where": plain(where),
        "moved_s": row.moved_s,
    }


def _size(path: Any) -> str:
    try:
        return str(path.stat().st_size)
    except OSError:
        return "none"
