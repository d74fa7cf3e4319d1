"""What `plan.model.freeze` means: towers, patterns, and what is refused."""

from __future__ import annotations

import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import Parameter
from diptych.model.freeze import frozen_names, mark

TOWERS = {
    "model.visual.patch_embed.proj.weight": "vision",
    **{f"model.visual.blocks.{i}.attn.qkv.weight": "vision" for i in range(12)},
    "model.visual.merger.norm.weight": "connector",
    "model.language_model.embed_tokens.weight": "language",
    **{f"model.language_model.layers.{i}.mlp.up_proj.weight": "language" for i in range(3)},
}


@pytest.mark.parametrize(
    ("entries", "frozen"),
    [
        ([], set()),
        (["connector"], {"model.visual.merger.norm.weight"}),
        (
            ["model.visual.blocks.[0-3].*"],
            {f"model.visual.blocks.{i}.attn.qkv.weight" for i in range(4)},
        ),
        # A star is any text: 1, 10 and 11.
        (
            ["model.visual.blocks.1*"],
            {f"model.visual.blocks.{i}.attn.qkv.weight" for i in (1, 10, 11)},
        ),
        (
            ["connector", "*.embed_tokens.weight"],
            {"model.visual.merger.norm.weight", "model.language_model.embed_tokens.weight"},
        ),
    ],
)
def test_towers_and_patterns(entries, frozen):
    assert frozen_names(entries, towers=TOWERS) == frozen


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("vison", r"has 'vison', which is no tower and matches no parameter.*are: vision"),
        (
            "model.visual.blok.3.attn.qkv.weight",
            r"are: model\.visual\.blocks\.0\.attn\.qkv\.weight, ",
        ),
        ("model.visual.blocks.3", r"is a module; write 'model\.visual\.blocks\.3\.\*'"),
        ("model.visual.blocks.[4-2].*", r"matches no parameter"),
        ("MODEL.visual.*", r"matches no parameter"),
        ("head", r"no parameter there: with tied word embeddings .*Take head out"),
        ("", r"has '', which is no tower"),
    ],
)
def test_what_means_nothing_is_refused_with_the_nearest_names(entry, message):
    with pytest.raises(ConfigError, match=message):
        frozen_names(["connector", entry], towers=TOWERS)


@pytest.mark.parametrize("entries", [["*"], ["vision", "connector", "language"]])
def test_a_model_of_which_nothing_trains_is_refused(entries):
    with pytest.raises(ConfigError, match=r"so that nothing trains.*Take an entry out"):
        frozen_names(entries, towers=TOWERS)


def test_a_parameter_says_whether_it_trains_and_whether_it_embeds():
    listed = [
        Parameter(name=name, shape=(2, 2), dtype="float32", tower=tower, block="")
        for name, tower in TOWERS.items()
    ]
    embedding = "model.language_model.embed_tokens.weight"
    marked = mark(listed, freeze=["vision"], embeddings=[embedding])
    assert {each.name for each in marked if each.embeds} == {embedding}
    assert [each.trains for each in marked] == [each.tower != "vision" for each in listed]
