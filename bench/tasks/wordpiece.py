"""The uncased WordPiece tokenizer of BERT-like encoders, from its vocabulary file."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

START, END, UNKNOWN = "[CLS]", "[SEP]", "[UNK]"
LONGEST = 100
"""Characters of a word; longer ones are unknown."""


def read_vocabulary(text: str) -> dict[str, int]:
    """Return token to number of a vocabulary of one token a line."""
    return {token: number for number, token in enumerate(text.split("\n")) if token}


def words_of(text: str) -> list[str]:
    """Return the lower-case words, without accents; punctuation and ideographs one by one."""
    plain = unicodedata.normalize("NFD", text.lower())
    spaced: list[str] = []
    for character in plain:
        kind = unicodedata.category(character)
        if kind == "Mn" or (kind.startswith("C") and not character.isspace()):
            continue
        alone = (
            kind.startswith("P")
            or character in "$+<=>^`|~"
            or 0x4E00 <= ord(character) <= 0x9FFF
            or 0x3400 <= ord(character) <= 0x4DBF
        )
        spaced.append(f" {character} " if alone else character)
    return "".join(spaced).split()


def pieces(word: str, vocabulary: Mapping[str, int]) -> list[str]:
    """Return a word as the longest pieces of the vocabulary, from the left."""
    found: list[str] = []
    start = 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocabulary:
                found.append(piece)
                start = end
                break
        else:
            return [UNKNOWN]
    return found if len(word) <= LONGEST else [UNKNOWN]


def tokens_of(text: str, vocabulary: Mapping[str, int], length: int) -> list[int]:
    """Return the token numbers of a text, start and end included, at most `length`."""
    found = [piece for word in words_of(text) for piece in pieces(word, vocabulary)]
    return [vocabulary[piece] for piece in (START, *found[: length - 2], END)]
