"""Steps profiled in real runs: which, by whose request, and what is left where it cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from diptych.core.errors import FormatError, RunError
from diptych.core.records import Layout, ObserveSpec, ProfileSpec
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.traces import find_traces, summarise
from diptych.parallel.mesh import World
from diptych.parallel.phases import Phases
from diptych.train.profiler import MOST_STEPS, Profiler, ProfileRequest
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


def _folder(corpus, path, **profile):
    spec = make_spec(
        corpus,
        layout=Layout(engine="ddp", dp=2, micro_batch=4),
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE,
        num_steps=8,
    )
    observe = ObserveSpec(sample_every_s=0, profile=ProfileSpec(**profile))
    placement = spec.placement.model_copy(update={"observe": observe})
    folder = RunFolder(path / "run")
    folder.path.mkdir()
    folder.write_spec(spec.model_copy(update={"placement": placement}))
    return folder


@pytest.mark.parametrize(
    ("profile", "asked", "steps", "first"),
    [({}, {"steps": 2}, 2, 2), ({"every_steps": 5, "num_steps": 1}, None, 1, 7)],
)
def test_all_ranks_trace_the_same_steps(corpus, ranks, tmp_path, profile, asked, steps, first):
    folder = _folder(corpus, tmp_path, **profile)
    if asked:
        folder.profile.write_text(json.dumps(asked))
    ranks(2).run(train_rank, folder=folder.path)
    assert not folder.profile.exists()
    assert sorted(path.name for path in folder.traces.iterdir()) == [f"step-{first:08d}"]
    traces = find_traces(folder.traces)
    assert list(traces) == [0, 1]
    for rank, path in traces.items():
        found = summarise(path)
        assert (found.rank, found.num_steps, found.on_device) == (rank, steps, False)
        assert found.span_s > found.busy_s > 0
        assert {"forward", "backward", "update", "data"} <= set(found.phases_s)
        assert "profile" not in found.phases_s
        assert sum(found.phases_s.values()) <= found.span_s
        assert "matrix products" in {each.name for each in found.classes}
        counted = {each.name: each.count for each in found.operators}
        assert any(name.startswith("aten::") for name in counted)
    records = folder.read_steps()
    assert [record.step for record in records] == list(range(1, 9))
    # The one that warms up, those that are traced, and the one that the trace was written before.
    profiled = list(range(first - 1, first + steps + 1))
    assert [record.step for record in records if record.profiled] == profiled
    took = [record.step for record in records if record.phases_s["profile"].least > 0]
    assert took == profiled


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_what_a_profile_takes_is_a_phase_of_its_own(tmp_path, monkeypatch):
    clock = Clock()

    class Slow:
        """torch's profiler with known times; a step that is profiled takes none."""

        def __init__(self, **_):
            clock.now_s += 1

        def start(self):
            clock.now_s += 2

        def step(self):
            clock.now_s += 4

        def stop(self):
            clock.now_s += 8

        def export_chrome_trace(self, path):
            clock.now_s += 16
            Path(path).write_bytes(b"")

    monkeypatch.setattr("diptych.train.profiler.profile", Slow)
    phases = Phases(WORLD.device, clock=clock)
    profiler = Profiler(tmp_path, spec=ProfileSpec(), phases=phases, world=WORLD)
    found = []
    for step, asked in enumerate([0, 1, 0, 0, 0]):
        profiled = profiler(step, asked)
        clock.now_s += 100
        found.append((profiled, {name: s for name, s in phases.take().items() if s}))
    assert found == [
        (False, {"other": 100.0}),
        (True, {"profile": 3.0, "other": 100.0}),
        (True, {"profile": 4.0, "other": 100.0}),
        (True, {"profile": 28.0, "other": 100.0}),
        (False, {"other": 100.0}),
    ]


@pytest.mark.parametrize("text", ["", "{}", '{"steps": "many"}', "[3]", '{"steps": -2}'])
def test_a_request_that_asks_for_no_number_is_dropped(tmp_path, text):
    path = tmp_path / "profile"
    path.write_text(text)
    request = ProfileRequest(path, world=WORLD)
    assert (request(), request(), path.exists()) == (0, 0, False)


def test_no_request_asks_for_too_many_steps(tmp_path):
    path = tmp_path / "profile"
    path.write_text('{"steps": 100000}')
    assert ProfileRequest(path, world=WORLD)() == MOST_STEPS


def test_no_trace_is_said(tmp_path):
    with pytest.raises(RunError, match="There is no trace in"):
        find_traces(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not gzip", gzip.compress(b"{}"), gzip.compress(b"[1")])
def test_what_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "rank-00000.json.gz"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="is no trace of torch's profiler"):
        summarise(path)
