"""Groups of equal rate and decay, worked by hand."""

from __future__ import annotations

import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import OptimizerSpec, Parameter, TowerRates
from diptych.shape.groups import group_parameters


def parameter(name, tower, *, block="", shape=(4, 4), trains=True, embeds=False):
    return Parameter(
        name=name,
        shape=shape,
        dtype="float32",
        tower=tower,
        block=block,
        trains=trains,
        embeds=embeds,
    )


MODEL = (
    parameter("patch", "vision", shape=(4, 3, 2, 2)),
    parameter("pos", "vision", embeds=True),
    *(
        parameter(f"v{i}.{kind}", "vision", block=f"v{i}", shape=shape)
        for i in range(3)
        for kind, shape in (("norm", (4,)), ("matrix", (4, 4)))
    ),
    parameter("after", "vision", shape=(4,)),
    parameter("merger", "connector"),
    parameter("embed", "language", embeds=True),
    parameter("l0.matrix", "language", block="l0"),
    parameter("norm", "language", shape=(4,)),
)


def table(*parameters, **fields):
    groups = group_parameters(parameters or MODEL, spec=OptimizerSpec(**fields))
    return {
        each.name: (pytest.approx(group.lr_scale), group.weight_decay, group.algorithm)
        for group in groups
        for each in group.parameters
    }


def test_without_settings_there_are_those_that_decay_and_those_that_do_not():
    decayed, plain = group_parameters(MODEL, spec=OptimizerSpec(weight_decay=0.1))
    assert [each.name for each in decayed.parameters] == [
        *("patch", "v0.matrix", "v1.matrix", "v2.matrix", "merger", "l0.matrix"),
    ]
    assert (decayed.weight_decay, plain.weight_decay) == (0.1, 0.0)
    assert {decayed.lr_scale, plain.lr_scale} == {1.0}
    assert len(decayed.parameters) + len(plain.parameters) == len(MODEL)


def test_a_tower_s_rates_fall_block_by_block():
    """Three blocks, a tenth of the rate, halved per block; what is before them is one more."""
    rates = TowerRates(lr=0.1, weight_decay=0.0, layer_decay=0.5)
    found = table(lr=1.0, weight_decay=0.3, towers={"vision": rates})
    assert found["patch"] == found["pos"] == (0.1 / 8, 0.0, "adamw")
    assert found["v0.matrix"] == found["v0.norm"] == (0.1 / 4, 0.0, "adamw")
    assert found["v1.matrix"] == (0.1 / 2, 0.0, "adamw")
    assert found["v2.matrix"] == found["after"] == (0.1, 0.0, "adamw")
    assert found["merger"] == found["l0.matrix"] == (1.0, 0.3, "adamw")
    assert found["embed"] == found["norm"] == (1.0, 0.0, "adamw")


def test_a_frozen_block_keeps_its_place():
    frozen = tuple(each.model_copy(update={"trains": each.block != "v1"}) for each in MODEL)
    found = table(*frozen, lr=1.0, towers={"vision": TowerRates(layer_decay=0.5)})
    assert found["v0.matrix"] == (0.25, 0.05, "adamw")
    assert "v1.matrix" not in found


def test_towers_of_equal_settings_share_a_group():
    same = {"vision": TowerRates(lr=0.1), "connector": TowerRates(lr=0.1)}
    groups = group_parameters(MODEL, spec=OptimizerSpec(lr=1.0, towers=same))
    # Two rates, decayed and not.
    assert len(groups) == 4
    # How many there are is no matter of numbers: the planner does not know the rate.
    other = {"vision": TowerRates(lr=1.0)}
    assert len(group_parameters(MODEL, spec=OptimizerSpec(lr=1.0, towers=other))) == 4
    assert len(group_parameters(MODEL, spec=OptimizerSpec(weight_decay=0.0))) == 2


def test_muon_has_the_matrices_of_blocks():
    found = table(kind="muon")
    muon = {name for name, (_, _, algorithm) in found.items() if algorithm == "muon"}
    assert muon == {"v0.matrix", "v1.matrix", "v2.matrix", "l0.matrix"}
    assert {algorithm for _, _, algorithm in found.values()} == {"muon", "adamw"}


def test_rates_of_a_tower_of_which_nothing_trains_are_refused():
    with pytest.raises(ConfigError, match=r"towers has head, of which nothing trains: it is fro"):
        table(towers={"head": TowerRates(lr=1.0)})
    frozen = tuple(each.model_copy(update={"trains": each.tower != "vision"}) for each in MODEL)
    with pytest.raises(ConfigError, match=r"has vision.*Take vision out of"):
        table(*frozen, towers={"vision": TowerRates(lr=1.0)})
