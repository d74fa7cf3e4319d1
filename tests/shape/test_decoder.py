"""Numbers of towers that every family refuses."""

import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import TokenIds
from diptych.shape.tiles import check_decoder, one_side

TOKENS = TokenIds(
    num_tokens=9, pad=0, eos=2, image=5, video=None, vision_start=None, vision_end=None
)


def sizes(**text):
    return {"text": {"vocab_size": 16, "num_attention_heads": 4, **text}}


@pytest.mark.parametrize("key_heads", [1, 2, 4, None])
def test_key_heads_that_divide_the_query_heads_are_taken(key_heads):
    check_decoder(sizes(num_key_value_heads=key_heads), tokens=TOKENS)


def test_key_heads_that_do_not_are_refused():
    with pytest.raises(ConfigError, match="num_attention_heads is 4, its num_key_value_heads 3"):
        check_decoder(sizes(num_key_value_heads=3), tokens=TOKENS)


@pytest.mark.parametrize("size", [0, [0, 0], [-8, -8]])
def test_a_side_of_nothing_is_refused(size):
    with pytest.raises(ConfigError, match="have a side of"):
        one_side(size)
