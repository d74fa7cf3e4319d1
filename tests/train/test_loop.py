"""The loop with a model of one weight: what is counted, skipped, saved and given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diptych.core.errors import RunError
from diptych.core.records import Layout, OptimizerSpec
from diptych.parallel.mesh import World
from diptych.parallel.spread import spread
from diptych.train import loop
from diptych.train.heldout import HeldoutLoss
from diptych.train.loop import Hooks, LoopSettings, TrainState, train

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@dataclass
class Micro:
    """Its loss is `sum(weight * values)`; the names are a micro-batch's."""

    values: torch.Tensor
    input_ids_BS = labels_BS = position_ids_3BS = grid_thw_I3 = None
    source_ids_BS = segment_ids_BS = None

    @property
    def pixel_values_PD(self):
        return self.values


@dataclass
class Batch:
    step: int
    micro_batches: list[Micro]
    num_label_tokens: int = 4
    epoch: int = 0
    number: int = 0
    num_rows: int = 2
    num_samples: int = 3
    num_paired: int = 2
    num_samples_by_source: tuple[int, ...] = (3, 0)
    num_label_tokens_by_source: tuple[int, ...] = (4, 0)
    cost: float = 2.0
    num_text_tokens: int = 6
    num_image_tokens: int = 2
    num_patches: int = 8
    num_slots: int = 10
    squares: tuple[int, int, int] = (50, 30, 20)
    masked_keys: tuple[str, ...] = ()


class Scale(nn.Module):
    def __init__(self, on_forward: Callable[[], object] = lambda: None):
        super().__init__()
        self.on_forward = on_forward
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *, pixel_values, **unused):
        self.on_forward()
        loss = (self.weight * pixel_values).sum()
        return loss, torch.stack([loss.detach(), torch.zeros(())])


class Saves:
    """Saves at once."""

    share = (0.0, 0.0)
    num_failed = 0

    def __init__(self, save: Callable[[TrainState], object]) -> None:
        self._save = save
        self._step = 0

    def observe(self, shares, *, step_s):
        pass

    def save_weights(self, state):
        raise AssertionError("nobody asked for weights")

    def save(self, state):
        self._step = state.step
        self._save(state)

    def conclude(self, state):
        if state.step != self._step:
            self.save(state)


def _train(
    batches,
    *,
    num_steps,
    stop_requested=lambda: False,
    records=None,
    events=None,
    world=WORLD,
    layout=None,
    hooks_s=0.0,
    module=None,
    checkpoint_every_steps=0,
    heldout_every_steps=0,
    **settings,
):
    """Train from step 0; `records` and `events` are filled meanwhile. Hooks take `hooks_s`."""
    records = [] if records is None else records
    events = [] if events is None else events
    module = module or Scale(lambda: events.append("compute"))
    saved = []

    def record(each):
        events.append(f"record {each.step}")
        records.append(each)

    def save(state):
        time.sleep(hooks_s)
        events.append(f"save {state.step}")
        saved.append((state.step, list(state.skipped_steps)))

    def heldout():
        time.sleep(hooks_s)
        events.append("heldout")
        return HeldoutLoss(0.25, (0.25, None))

    state = train(
        batches,
        engine=spread(
            module,
            model=module,
            units=(),
            layout=layout or Layout(),
            world=world,
            build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        ),
        state=TrainState(),
        settings=LoopSettings(
            num_steps=num_steps,
            seed=0,
            optimizer=OptimizerSpec(lr=0.5, warmup_steps=0, final_lr_fraction=1, max_grad_norm=100),
            checkpoint_every_steps=checkpoint_every_steps,
            heldout_every_steps=heldout_every_steps,
            sources=("ours", "theirs"),
            **settings,
        ),
        hooks=Hooks(
            record=record, saves=Saves(save), heldout=heldout, stop_requested=stop_requested
        ),
        world=world,
    )
    return state, records, saved, module.weight.item()


def _batches(*gradients):
    for step in count():
        value = gradients[step % len(gradients)]
        # Two micro-batches; the loss is a mean over the batch's 4 label tokens.
        micros = [Micro(torch.tensor([value])), Micro(torch.tensor([3 * value]))]
        yield Batch(step, micros)


def test_the_loss_is_a_mean_over_the_global_batch_s_label_tokens():
    state, records, saved, weight = _train(_batches(1.0), num_steps=1)
    # Gradient (1 + 3) / 4 label tokens = 1, rate 0.5.
    assert (records[0].loss, records[0].grad_norm, weight) == (1.0, 1.0, 0.5)
    assert records[0].padding_fraction == pytest.approx(0.2)
    assert (state.step, saved) == (1, [(1, [])])


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    state, records, saved, weight = _train(_batches(float("nan"), 1.0), num_steps=2)
    assert [record.skipped for record in records] == [True, False]
    assert (records[0].loss, records[0].grad_norm) == (None, None)
    assert (state.skipped_steps, state.num_updates, weight) == ([0], 1, 0.5)
    assert saved == [(2, [0])]


def test_a_run_whose_every_gradient_is_not_finite_is_given_up():
    records = []
    with pytest.raises(RunError, match="not finite in 10 steps"):
        _train(_batches(float("inf")), num_steps=50, records=records)
    # Nobody goes on to write the last one's record.
    assert [record.step for record in records] == list(range(1, 11))


def test_on_request_what_was_found_is_in_the_record_and_in_the_error():
    why = "rank 0: in micro-batch 1 the pixel values hold Inf"
    _, records, _, _ = _train(_batches(float("inf"), 1.0), num_steps=2, name_nonfinite=True)
    assert [record.nonfinite for record in records] == [why, None]
    with pytest.raises(RunError, match=f"not finite in 10 steps up to step 9: {why}"):
        _train(_batches(float("inf")), num_steps=50, name_nonfinite=True)


def test_without_the_request_the_error_says_how_to_ask():
    _, records, _, _ = _train(_batches(float("nan"), 1.0), num_steps=1)
    assert records[0].nonfinite is None
    with pytest.raises(RunError, match=r"train\.name_nonfinite: true says which module"):
        _train(_batches(float("nan")), num_steps=50)


def test_checkpoints_and_held_out_loss_come_when_due():
    _, records, saved, _ = _train(
        _batches(0.0), num_steps=5, checkpoint_every_steps=2, heldout_every_steps=3
    )
    assert [step for step, _ in saved] == [2, 4, 5]
    assert [record.step for record in records if record.heldout_loss == 0.25] == [3, 5]


def test_a_gpu_s_unused_memory_is_given_back_every_so_many_steps(monkeypatch):
    released = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(step))
    for device, expected in (("cuda", [3, 6]), ("cpu", [])):
        world = World(rank=0, size=1, device=torch.device(device))
        for step in range(1, 8):
            loop._release_cache(step, every=3, world=world)
            loop._release_cache(step, every=0, world=world)
        assert released == expected
        released.clear()


def _told(events: list[str], *, num_steps: int, wait_s: float = 0.0) -> Iterator[Batch]:
    """Yield just the batches that are needed, each of one micro-batch."""
    for step in range(num_steps):
        time.sleep(wait_s)
        events.append(f"fetch {step}")
        yield Batch(step, [Micro(torch.tensor([0.0]))])


def test_a_batch_is_fetched_ahead_and_a_record_comes_a_step_late_unless_it_is_needed():
    events = []
    _train(
        _told(events, num_steps=5),
        num_steps=5,
        events=events,
        checkpoint_every_steps=2,
        heldout_every_steps=3,
    )
    steps = [
        ["fetch 0", "fetch 1", "compute"],
        ["fetch 2", "compute", "record 1", "record 2", "save 2"],
        ["fetch 3", "compute", "heldout"],
        ["fetch 4", "compute", "record 3", "record 4", "save 4"],
        ["compute", "heldout", "record 5", "save 5"],
    ]
    assert events == [event for step in steps for event in step]


def test_a_skipped_step_has_its_record_before_the_next_one():
    events = []
    _train(_batches(1.0, float("nan"), 1.0), num_steps=3, events=events)
    computed = ["compute", "compute"]
    assert events == [*computed, *computed, "record 1", "record 2", *computed, "record 3", "save 3"]


@pytest.mark.parametrize(
    ("num_computed", "num_done"),
    [
        pytest.param(0, 0, id="before the first step"),
        pytest.param(1, 2, id="in the first step"),
        pytest.param(3, 4, id="in the third step"),
        pytest.param(4, 5, id="in the last step but one"),
        pytest.param(5, 5, id="in the last step"),
    ],
)
def test_a_stop_request_is_heeded_a_step_later_and_saves_what_is_done(num_computed, num_done):
    events = []
    state, records, saved, _ = _train(
        _told(events, num_steps=5),
        num_steps=5,
        events=events,
        stop_requested=lambda: events.count("compute") >= num_computed,
    )
    assert (state.step, state.stopped) == (num_done, num_done < 5)
    assert [record.step for record in records] == list(range(1, num_done + 1))
    assert saved == ([(num_done, [])] if num_done else [])
    if num_done:
        assert events[-2:] == [f"record {num_done}", f"save {num_done}"]


def test_steps_add_up_to_the_time_that_passed():
    started = time.perf_counter()
    _, records, _, _ = _train(_told([], num_steps=4, wait_s=0.03), num_steps=4)
    passed_s = time.perf_counter() - started
    steps_s = sum(record.step_s for record in records)
    waited_s = [record.data_s for record in records]
    # The first step waits for its own batch and the next, the last one for none.
    assert waited_s[0] >= 0.06
    assert min(waited_s[1:3]) >= 0.03
    assert waited_s[3] < 0.01
    assert sum(waited_s) <= steps_s <= passed_s
    assert all(record.tokens_per_s == pytest.approx(8 / record.step_s) for record in records)


def test_held_out_losses_and_checkpoints_are_in_no_step_s_time():
    _, records, _, _ = _train(
        _batches(0.0), num_steps=3, heldout_every_steps=1, checkpoint_every_steps=1, hooks_s=0.2
    )
    assert max(record.step_s for record in records) < 0.2


LABELS = ((4, 8), (4, 4), (1, 2))
"""By step, of two ranks."""


def _train_rank(*, stop_by: int | None = None, num_steps: int = 3) -> tuple[Any, ...]:
    """Train on two ranks whose batches differ; `stop_by`, in its first step, asks to stop."""
    world = World(rank=dist.get_rank(), size=2, device=torch.device("cpu"))
    events = []

    def batches() -> Iterator[Batch]:
        for step in range(num_steps):
            labels = LABELS[step % 3][world.rank]
            # Of loss 4 x weight x 1 on the first rank, and 4 x weight x 2 on the second.
            values = [torch.tensor([each * (1.0 + world.rank)]) for each in (1.0, 3.0)]
            yield Batch(
                step,
                [Micro(value) for value in values],
                num_label_tokens=labels,
                num_label_tokens_by_source=(labels, 0),
                cost=1.0 + 2 * world.rank,
                num_rows=1 + world.rank,
                masked_keys=("a",) * (world.rank + step),
            )

    state, records, saved, weight = _train(
        batches(),
        num_steps=num_steps,
        stop_requested=lambda: stop_by == world.rank and "compute" in events,
        events=events,
        world=world,
        layout=Layout(engine="ddp", dp=2),
        heldout_every_steps=2,
    )
    return state, records, saved, weight, events


def test_ranks_whose_batches_differ_write_the_same_records(ranks):
    first, second = ranks(2).run(_train_rank)
    assert first == second
    _, records, saved, weight, _ = first
    # Loss: 12 x weight over 12, 8 and 3 labels. Gradients are 12 over those, the rate 0.5:
    # weights are 1, 0.5, -0.25 and -2.25.
    assert [record.loss for record in records] == pytest.approx([1.0, 0.75, -1.0])
    assert [record.grad_norm for record in records] == pytest.approx([1.0, 1.5, 4.0])
    assert weight == pytest.approx(-2.25)
    assert [record.num_label_tokens for record in records] == [12, 8, 3]
    assert [record.num_label_tokens_by_source["ours"] for record in records] == [12, 8, 3]
    assert [record.loss_by_source["ours"] for record in records] == pytest.approx([1, 0.75, -1])
    # Costs 1 and 3: one rank waits two thirds of the time, the other not at all.
    assert [record.idle_fraction for record in records] == pytest.approx([1 / 3] * 3)
    assert [record.num_rows for record in records] == [3, 3, 3]
    # 0 + 1, 1 + 2 and 2 + 3 in a step.
    assert [record.num_masked for record in records] == [1, 4, 9]
    assert [record.heldout_loss for record in records] == [None, 0.25, 0.25]
    assert saved == [(3, [])]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_stop_where_one_is_asked_to(ranks, rank):
    found = ranks(2).run(_train_rank, stop_by=rank, num_steps=9)
    for state, records, saved, _, events in found:
        assert (state.step, state.stopped, saved) == (2, True, [(2, [])])
        assert [record.step for record in records] == [1, 2]
        assert events.count("compute") == 4
    assert found[0][1] == found[1][1]


def test_masked_samples_are_counted():
    def batches():
        for batch in _batches(0.0):
            batch.masked_keys = ("a", "b") if batch.step == 1 else ()
            yield batch

    state, records, _, _ = _train(batches(), num_steps=3)
    assert [record.num_masked for record in records] == [0, 2, 2]
    assert state.num_masked == 2


class Both(Scale):
    """Returns beside its loss, of which each value is one of language, another of images."""

    def forward(self, *, pixel_values, labels_per_pair, **unused):
        language, by_source = super().forward(pixel_values=pixel_values)
        vision = (self.weight * pixel_values**2).sum()
        both = torch.stack([language.detach(), vision.detach()])
        return language + labels_per_pair * vision, by_source, both


@pytest.mark.parametrize(("value", "losses"), [(1.0, (1.0, 5.0)), (float("nan"), (None, None))])
def test_the_contrastive_loss_is_a_mean_over_samples_with_image_and_label(value, losses):
    # Values 1 and 3 of 4 labels and 2 samples: (1 + 3) / 4, and (1 + 9) / 2.
    records = []
    _train(_batches(value), num_steps=1, records=records, module=Both())
    assert (records[0].loss, records[0].vision_loss) == losses
    assert records[0].skipped == (value != 1)
    # The gradient by the weight is that of both.
    assert records[0].grad_norm == (6.0 if value == 1 else None)


def test_without_such_samples_there_is_no_contrastive_loss():
    def batches():
        for batch in _batches(0.0):
            batch.num_paired = 0
            yield batch

    _, records, _, _ = _train(batches(), num_steps=1, module=Both())
    assert (records[0].loss, records[0].vision_loss) == (0.0, None)


def test_every_source_keeps_its_name_in_counts_and_losses():
    _, records, _, _ = _train(_batches(1.0), num_steps=1, heldout_every_steps=1)
    record = records[0]
    assert record.loss_by_source == {"ours": 1.0}
    assert record.num_samples_by_source == {"ours": 3, "theirs": 0}
    assert record.num_label_tokens_by_source == {"ours": 4, "theirs": 0}
    assert record.heldout_loss_by_source == {"ours": 0.25}
    assert (record.num_rows, record.num_samples, record.idle_fraction) == (2, 3, 0.0)
