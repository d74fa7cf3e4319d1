from __future__ import annotations

import pytest

from diptych.core.terminal import plain


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("loss 0.5\n", "loss 0.5"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;never ends", ""),
        ("\x1bP1$rm\x1b\\after", "after"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("\x9b2Jgone", "?2Jgone"),
        ("bell\x07 and null\x00", "bell? and null?"),
        ("turned \u202eround", "turned ?round"),
        ("10%\r50%\r100%\r\n", "100%"),
        ("a\tb", "a\tb"),
        ("größer 猫", "größer 猫"),
        ("\x1b", ""),
    ],
)
def test_nothing_reaches_the_terminal_but_text(line, shown):
    assert plain(line) == shown
