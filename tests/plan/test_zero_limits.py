"""What ZeRO cannot do is refused with what to do."""

from __future__ import annotations

import pytest

from diptych.core.records import Layout
from diptych.plan.zero_limits import refusal
from tests.plan.conftest import shape_of_size

NVME = {"to": "nvme", "path": "/disk"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dp": 2, "shard": 2}, "engine fsdp2"),
        ({"zero": {"stage": 2, "parameters": {"to": "cpu"}}}, "set zero.stage to 3"),
        ({"zero": {"stage": 1, "optimizer": NVME}}, "zero.optimizer.to to cpu"),
        ({"zero": {"stage": 3, "optimizer": {"to": "nvme"}}}, "no disk is named"),
        ({"zero": {"stage": 3, "parameters": {"to": "cpu", "path": "/disk"}}}, "to nvme"),
        ({"grad_sync": "every", "zero": {"stage": 1}}, "zero.stage 2 or 3"),
        ({"zero": {"allgather_bucket_elements": 1001}}, "set it to 1002"),
        ({"zero": {"stage": 3, "optimizer": {**NVME, "buffer_count": 3}}}, "to 4 or more"),
    ],
)
def test_a_combination_is_refused(fields, words):
    layout = Layout.model_validate({"engine": "zero", "shard": 2, **fields})
    assert words in (refusal(layout) or "")


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "optimizer": {"to": "cpu"}},
        {"stage": 3, "optimizer": NVME, "parameters": NVME},
        {"stage": 3, "parameters": {"to": "cpu"}},
    ],
)
def test_what_works_is_not(zero):
    assert refusal(Layout.model_validate({"engine": "zero", "shard": 2, "zero": zero})) is None


def test_a_buffer_holds_a_rank_s_part_of_the_largest_parameter():
    shape = shape_of_size(1001, num_blocks=1)

    def reason(buffer_size):
        parameters = {**NVME, "buffer_size": buffer_size}
        fields = {"engine": "zero", "shard": 2, "zero": {"stage": 3, "parameters": parameters}}
        return refusal(Layout.model_validate(fields), model_shape=shape)

    assert "has 501 elements" in (reason(500) or "")
    assert reason(501) is None
