from __future__ import annotations

import io

import pytest
from rich.console import Console

from diptych.core.records import Check, RunRow
from diptych.drawing import checks_table, plot, problems, runs_table

ROW = RunRow(
    run_id="c804a17423fc",
    folder="runs/c804a17423fc",
    state="running",
    step=120,
    num_steps=1200,
    loss=1.23456,
    heldout_loss=1.5,
    tokens_per_s=2430.0,
    kind="slurm",
    job_id="4711",
    host="login-1",
    moved_s=1000.0,
)


def _print(table, *, width, **options):
    out = io.StringIO()
    Console(file=out, width=width, **options).print(table)
    return out.getvalue()


def test_a_wide_table_has_everything():
    text = _print(runs_table([ROW], width=120, now_s=1090.0), width=120)
    titles, cells = text.splitlines()
    heads = ["run", "state", "step", "loss", "held-out", "tokens/s", "where", "moved"]
    assert titles.split() == heads
    assert " ".join(cells.split()) == (
        "c804a17423fc running 120/1200 1.2346 1.5000 2.43 k slurm 4711 login-1 1 min 30 s ago"
    )


@pytest.mark.parametrize(
    ("width", "gone"),
    [
        (90, {"tokens/s"}),
        (80, {"tokens/s", "held-out"}),
        (60, {"tokens/s", "held-out", "where"}),
        (36, {"tokens/s", "held-out", "where", "loss", "moved"}),
    ],
)
def test_a_narrow_one_leaves_columns_out_and_cuts_nothing(width, gone):
    text = _print(runs_table([ROW], width=width, now_s=1090.0), width=width)
    heads = {"run", "state", "step", "loss", "held-out", "tokens/s", "where", "moved"}
    assert set(text.splitlines()[0].split()) == heads - gone
    assert "…" not in text
    assert "c804a17423fc" in text
    assert max(map(len, text.splitlines())) <= width


def test_what_is_not_known_is_empty():
    row = RunRow(run_id="a", folder="a", state="damaged", problem="no \x1b[31mspec")
    assert _print(runs_table([row], width=100), width=100).splitlines()[1].split() == [
        "a",
        "damaged",
        "-/-",
    ]
    assert problems([row, ROW]) == ["a is damaged: no spec"]


def test_names_of_others_are_no_markup():
    row = ROW.model_copy(update={"run_id": "[red]x[/]", "host": "\x1b]0;y\x07h"})
    text = _print(runs_table([row], width=120), width=120, force_terminal=True)
    assert "[red]x[/]" in text
    assert "\x1b]" not in text


def test_a_cure_stands_below_what_it_cures():
    checks = [
        Check(name="disk", status="fail", found="[b]full[/b]", cure="Free some room"),
        Check(name="git", status="pass", found="clean", cure="never shown"),
    ]
    lines = _print(checks_table(checks), width=80).splitlines()
    assert lines[1].split() == ["disk", "fail", "[b]full[/b]", "driver"]
    assert lines[2].strip() == "Free some room"
    assert lines[3].split() == ["git", "pass", "clean", "driver"]
    assert len(lines) == 4


def test_a_plot_falls_where_values_fall():
    lines = plot([4.0, 3.0, 2.0, 1.0], width=10, height=2)
    assert lines == ["       4 █▃", "       1 ██▆▁"]


def test_a_plot_of_many_values_is_as_wide_as_asked():
    lines = plot([float(each % 7) for each in range(5000)], width=30, height=4)
    assert len(lines) == 4
    assert max(map(len, lines)) == 9 + 30
    assert plot([], width=10, height=2) == []
    assert plot([1.0, 1.0], width=10, height=1)[0].startswith("       1 ")


def test_a_terminal_without_blocks_gets_ascii():
    assert "".join(plot([4.0, 1.0, 2.0], width=9, height=3, encoding="ascii")).isascii()
