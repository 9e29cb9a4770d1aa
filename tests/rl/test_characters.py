"""A tokenizer of characters has one token for each, and an end token."""

from pathlib import Path

import pytest

from detjax.models import Tokenizer
from detjax.rl.runs.characters import CHARACTERS, END_TOKEN, character_tokenizer
from detjax.rl.tasks import TASKS


def test_every_character_is_the_token_of_its_position_and_the_end_is_the_last_token() -> None:
    tokenizer = character_tokenizer()
    assert tokenizer.encode(CHARACTERS) == list(range(len(CHARACTERS)))
    assert tokenizer.token_id("eos_token") == len(CHARACTERS) == len(tokenizer) - 1
    assert tokenizer.encode(f"1=1{END_TOKEN}") == [1, CHARACTERS.index("="), 1, len(CHARACTERS)]
    assert [tokenizer.token_bytes(token).decode() for token in range(len(tokenizer))] == [*CHARACTERS, END_TOKEN]
    assert [tokenizer.is_left_out(token) for token in range(len(tokenizer))] == [False] * len(CHARACTERS) + [True]


def test_texts_of_all_tasks_come_back_from_their_tokens() -> None:
    tokenizer = character_tokenizer()
    for task in TASKS.values():
        for difficulty in range(1, 20):
            example = task.example(0, difficulty, difficulty)
            text = example.prompt + task.solution(example)
            assert tokenizer.decode(tokenizer.encode(text + END_TOKEN)) == text
            stream = tokenizer.stream()
            assert len(tokenizer.encode(text)) == len(text), stream


@pytest.mark.parametrize("text", ["a", "1 1", "1\n", "\u0663", "<", "<unknown>"])
def test_texts_with_other_characters_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="vocabulary"):
        character_tokenizer().encode(text)


def test_the_tokenizer_is_loaded_from_its_files(tmp_path: Path) -> None:
    made = character_tokenizer("ab\n ")
    for name, content in made.files.items():
        (tmp_path / name).write_bytes(content)
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    assert loaded.encode("ba \n\na<end>") == made.encode("ba \n\na<end>") == [1, 0, 3, 2, 2, 0, 4]
    assert loaded.token_id("eos_token") == 4


@pytest.mark.parametrize("characters", ["", "aba"])
def test_no_characters_and_repeated_ones_are_refused(characters: str) -> None:
    with pytest.raises(ValueError, match=f"characters is '{characters}'; accepted: different characters"):
        character_tokenizer(characters)
