"""Text from strangers reaches the terminal without escape sequences: in sentences, lists and tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from run_tools import Command
from sifu.cli.output import harmless

CLEAR = "\x1b[2J"


def test_what_a_terminal_obeys_is_shown_as_question_marks() -> None:
    assert harmless(f"a{CLEAR}b\x07\x9b1m\u202e\r\nc\td é 客") == "a?[2Jb??1m??\nc\td é 客"


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--clients", f"{CLEAR}client"),
        ("request", "--clients", "client-001", "--id", f"{CLEAR}id"),
        ("verify", "--head", f"{CLEAR}heads"),
        ("decide", "q", "refuse", "--reason", f"{CLEAR}because"),
    ],
)
def test_a_sentence_about_bad_input_quotes_it_harmlessly(own_trained: Path, cli: Command, command: tuple) -> None:
    answer = cli(command[0], own_trained, *command[1:])
    assert answer.code == 2
    assert "\x1b" not in answer.out + answer.err


def test_messages_of_strangers_are_shown_harmlessly(own_trained: Path, cli: Command) -> None:
    """Anyone may put a message into the inbox, whose name is printed without escape sequences."""
    (own_trained / "inbox").mkdir(exist_ok=True)
    (own_trained / "inbox" / f"re{CLEAR}quest.a.json").write_text("{}")
    for command in ("requests", "status", "verify"):
        answer = cli(command, own_trained)
        assert answer.code == 0
        assert "\x1b" not in answer.out + answer.err
