from diptych.model.families import towers, units
from diptych.model.inspect import inspect


def test_blocks_are_those_of_the_shape(starter_model, model_spec):
    shape = inspect(model_spec)
    found = units(starter_model)
    assert [unit.name for unit in found if unit.is_block] == list(
        dict.fromkeys(p.block for p in shape.parameters if p.block)
    )
    assert all(starter_model.get_submodule(unit.name) is unit.module for unit in found)
    assert towers(starter_model) == {p.name: p.tower for p in shape.parameters}


def test_units_cover_the_connector_and_count_by_tower(starter_model, model_spec):
    found = units(starter_model)
    connectors = {p.name for p in inspect(model_spec).parameters if p.tower == "connector"}
    covered = {
        f"{unit.name}.{name}"
        for unit in found
        if not unit.is_block
        for name, _ in unit.module.named_parameters()
    }
    assert covered == connectors
    for tower in ("vision", "language", "connector"):
        depths = [unit.depth for unit in found if unit.tower == tower]
        assert depths == list(range(len(depths)))
        assert depths
