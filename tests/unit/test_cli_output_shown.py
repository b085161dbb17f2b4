"""What others wrote cannot steer the reader's terminal."""

from __future__ import annotations

import pytest

from coral_core.cli.output import print_note, print_table, print_text, shown

HOSTILE = "a\x1b[2J\x1b]0;title\x07b\x9bc\rd"


def test_signs_that_steer_a_terminal_are_replaced_and_lines_and_letters_stay():
    assert shown("plain\ttext\nüñ→") == "plain\ttext\nüñ→"
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(shown(HOSTILE))
    assert shown("\x00") == "\ufffd"


@pytest.mark.parametrize(
    "show", [print_text, print_note, lambda text: print_table(text, (text,), [(text,)], note=text)]
)
def test_every_way_of_printing_keeps_them_from_the_terminal(capsys, show):
    show(HOSTILE)
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
