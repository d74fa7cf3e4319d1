"""What a person sees of a run that goes on."""

from __future__ import annotations

import io

from rich.console import Console

from diptych.monitor.runs import read_row
from diptych.watching import Losses, Watched, draw
from tests.launch.test_progress import record
from tests.monitor.folders import make_run, write_log


def _draw(watched, *, width=80):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(
        draw(watched, width=width)
    )
    return out.getvalue()


def test_a_display_has_place_curve_checkpoints_and_warnings(tmp_path):
    folder = make_run(tmp_path, "aaaa")
    write_log(folder, 0, "2026-11-30 21:06:41,123 ERROR x \x1b[2J[bold]bad[/]\n")
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir()
    (checkpoint / "checksums.json").write_text("{}")
    watched = Watched(read_row(folder))
    watched.look()
    (folder / "status.json").write_text('{"state": "failed"}')
    watched.look()
    lines = _draw(watched).splitlines()
    assert lines[0].startswith("run aaaa  failed  local ")
    assert any(line.startswith("step 3/60  loss 0.3333") for line in lines)
    assert "       1 █" in "\n".join(lines)
    assert any(line.startswith("checkpoints of step 2; the newest") for line in lines)
    assert lines[-1].rstrip() == "[rank 0] ERROR x [bold]bad[/]"
    assert "\x1b[2J" not in "\n".join(lines)


def test_new_steps_extend_the_curve(tmp_path):
    folder = make_run(tmp_path, "aaaa", num_records=0)
    watched = Watched(read_row(folder))
    assert watched.look()[0] == []
    with (folder / "steps.jsonl").open("a") as steps:
        steps.write(record(1, loss=2.0).model_dump_json() + "\n")
        steps.write(record(2, loss=None, skipped=True).model_dump_json() + "\n")
        steps.write(record(3, loss=1.0).model_dump_json() + "\n")
    assert [each.step for each in watched.look()[0]] == [1, 2, 3]
    assert watched.losses.values == [2.0, 1.0]
    assert "no checkpoint yet" in _draw(watched)


def test_a_folder_that_is_damaged_meanwhile_is_shown_as_such(tmp_path):
    folder = make_run(tmp_path, "aaaa")
    watched = Watched(read_row(folder))
    (folder / "launch.json").write_text("{")
    with (folder / "steps.jsonl").open("a") as steps:
        steps.write("no record\n")
    watched.look()
    assert "launch.json cannot be read: it is no JSON" in _draw(watched)


def test_a_long_curve_stays_bounded_and_keeps_its_ends():
    losses = Losses([])
    for step in range(100_000):
        losses.add(float(step))
    assert 1024 <= len(losses.values) <= 2048
    assert losses.values == sorted(losses.values)
    assert losses.values[0] < 100
    assert losses.values[-1] > 99_800
