from diptych.model.families import blocks, towers
from diptych.model.inspect import inspect


def test_blocks_are_those_of_the_shape(starter_model, model_spec):
    shape = inspect(model_spec)
    named = blocks(starter_model)
    assert [name for name, _ in named] == list(
        dict.fromkeys(p.block for p in shape.parameters if p.block)
    )
    assert all(starter_model.get_submodule(name) is module for name, module in named)
    assert towers(starter_model) == {p.name: p.tower for p in shape.parameters}
