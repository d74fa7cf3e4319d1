from __future__ import annotations

from diptych.core.errors import ConfigError, DiptychError, nearest


def test_a_message_says_what_was_found_what_is_allowed_and_what_to_do():
    error = ConfigError("lr is -1", allowed="lr is above 0", cure="Set train.optimizer.lr")
    assert str(error) == "lr is -1. lr is above 0. Set train.optimizer.lr."
    assert isinstance(error, DiptychError)


def test_sentences_that_end_are_left_alone():
    assert str(ConfigError("Who?", allowed="Did you mean 'x'?")) == "Who? Did you mean 'x'?"


def test_nearest_names_the_nearest_or_lists_what_is_allowed():
    assert nearest("num_step", allowed=["num_steps", "seed"]) == "Did you mean 'num_steps'?"
    assert nearest("zzz", allowed=["b", "a"]) == "Allowed: a, b."
    assert nearest("zzz", allowed=[]) == ""
