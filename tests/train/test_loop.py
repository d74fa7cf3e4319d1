"""The loop with a model of one weight: what is counted, skipped, saved and given up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest
import torch
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
    num_samples_by_source: tuple[int, ...] = (3, 0)
    num_label_tokens_by_source: tuple[int, ...] = (4, 0)
    cost: float = 2.0
    num_text_tokens: int = 6
    num_image_tokens: int = 2
    num_patches: int = 8
    num_slots: int = 10
    masked_keys: tuple[str, ...] = ()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *, pixel_values, **unused):
        loss = (self.weight * pixel_values).sum()
        return loss, torch.stack([loss.detach(), torch.zeros(())])


def _train(
    batches,
    *,
    num_steps,
    stop_at=None,
    checkpoint_every_steps=0,
    heldout_every_steps=0,
    **settings,
):
    module = Scale()
    records, saved = [], []
    hooks = Hooks(
        record=records.append,
        save=lambda state: saved.append((state.step, list(state.skipped_steps))),
        heldout=lambda: HeldoutLoss(0.25, (0.25, None)),
        stop_requested=lambda: stop_at is not None and len(records) >= stop_at,
    )
    state = train(
        batches,
        engine=spread(
            module,
            model=module,
            units=(),
            layout=Layout(),
            world=WORLD,
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
        hooks=hooks,
        world=WORLD,
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
    with pytest.raises(RunError, match="not finite in 10 steps"):
        _train(_batches(float("inf")), num_steps=50)


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


def test_a_stop_request_saves_what_is_done():
    state, records, saved, _ = _train(_batches(0.0), num_steps=5, stop_at=3)
    assert (state.stopped, state.step, len(records), saved) == (True, 3, 3, [(3, [])])


def test_masked_samples_are_counted():
    def batches():
        for batch in _batches(0.0):
            batch.masked_keys = ("a", "b") if batch.step == 1 else ()
            yield batch

    state, records, _, _ = _train(batches(), num_steps=3)
    assert [record.num_masked for record in records] == [0, 2, 2]
    assert state.num_masked == 2


def test_every_source_keeps_its_name_in_counts_and_losses():
    _, records, _, _ = _train(_batches(1.0), num_steps=1, heldout_every_steps=1)
    record = records[0]
    assert record.loss_by_source == {"ours": 1.0}
    assert record.num_samples_by_source == {"ours": 3, "theirs": 0}
    assert record.num_label_tokens_by_source == {"ours": 4, "theirs": 0}
    assert record.heldout_loss_by_source == {"ours": 0.25}
    assert (record.num_rows, record.num_samples, record.idle_fraction) == (2, 3, 0.0)
