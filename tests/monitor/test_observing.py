"""Who samples and who observes; then a run of the tiny corpus with everything on."""

from __future__ import annotations

import json
import os

import pytest

from diptych.core.records import Layout, ObserveSpec
from diptych.monitor import observing as module
from diptych.monitor.observing import Place, observing, own_place
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.samples import read_samples
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.monitor.sinks.test_tensorboard import read_events
from tests.monitor.sinks.test_wandb import files_of, history
from tests.monitor.specs import make_spec
from tests.runs import make_spec as make_run_spec
from tests.runs import train_rank


def test_a_rank_s_place_is_its_device_as_cuda_shows_it(monkeypatch):
    monkeypatch.setenv("DIPTYCH_NODE", "gpu-7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    assert own_place(1).device == "GPU-bb"
    assert (own_place(None).device, own_place(None).node) == (None, "gpu-7")


@pytest.mark.parametrize(
    ("rank", "samples", "observes"),
    [(0, "a", True), (1, None, False), (2, "b", False), (3, None, False)],
)
def test_the_first_rank_of_a_node_samples_and_the_first_of_all_observes(
    tmp_path, monkeypatch, rank, samples, observes
):
    places = [
        Place("a", 10, "0"),
        Place("a", 11, "1"),
        Place("b", 12, "GPU-x"),
        Place("b", 13, None),
    ]
    texts = [json.dumps(vars(place)) for place in places]
    started, opened = [], []
    monkeypatch.setattr(module, "start_sampler", lambda folder, **named: started.append(named))
    original = module.open_observer
    monkeypatch.setattr(
        module, "open_observer", lambda *a, **named: opened.append(named) or original(*a, **named)
    )
    with observing(
        RunFolder(tmp_path),
        spec=make_spec(observe=ObserveSpec()),
        attempt=3,
        step=40,
        rank=rank,
        device_index=None,
        gather=lambda text: texts,
    ):
        pass
    facts = [(each["node"], each["pids"], each["devices"], each["attempt"]) for each in started]
    of_node = {"a": ("a", [10, 11], ["0", "1"], 3), "b": ("b", [12, 13], ["GPU-x"], 3)}
    assert facts == ([of_node[samples]] if samples else [])
    assert [each["nodes"] for each in opened] == ([["a", "a", "b", "b"]] if observes else [])


def _train(folder, *, home, die_at=None):
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ[variable] = str(home)
    return train_rank(folder, die_at=die_at)


def test_a_run_is_sampled_and_sent_also_when_it_fails_and_goes_on(ranks, corpus, tmp_path):
    spec = make_run_spec(
        corpus,
        layout=Layout(engine="ddp", micro_batch=4),
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE,
        num_steps=8,
        checkpoint_every_steps=3,
    )
    observe = ObserveSpec(sample_every_s=0.05, sinks=("wandb", "tensorboard"))
    placement = spec.placement.model_copy(update={"observe": observe})
    spec = spec.model_copy(update={"placement": placement})
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_spec(spec)
    options = {"folder": folder.path, "home": tmp_path / "home"}
    with pytest.raises(AssertionError, match="a planned fault"):
        ranks(1).run(_train, **options, die_at=5)
    first = [row["_step"] for row in history(files_of(folder.path, spec)[0])]
    assert first == list(range(1, len(first) + 1))
    assert len(first) >= 3
    assert ranks(1).run(_train, **options) == [8]
    logged = [row for path in files_of(folder.path, spec) for row in history(path)]
    assert [row["_step"] for row in logged] == list(range(1, 9))
    truth = [step.loss for step in folder.read_steps()]
    assert [row["loss/language"] for row in logged] == pytest.approx(truth)
    files = sorted((folder.path / "tensorboard").iterdir(), key=lambda each: each.name[-3:])
    resumed = [event.step for event in read_events(files[1]) if event.summary.value]
    assert resumed == list(range(4, 9))
    samples = read_samples(folder.samples, since_s=0)
    assert {sample.attempt for sample in samples} == {0, 1}
    assert all(sample.devices == () for sample in samples)
