"""Inputs that are no pictures: tokens of sentences, and speech-like sound. Seeded, made here."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

START, END, FULL_STOP = 101, 102, 1012
"""Tokens of the uncased WordPiece vocabulary with 30,522 entries."""
WORD_IDS = (
    *(1996, 1997, 1998, 2000, 1999, 1037, 2003, 2008, 2005, 2009, 2004, 2001, 2007, 2022, 2011),
    *(2006, 2025, 2002, 2023, 2024, 2030, 2010, 2013, 2012, 2029, 2021, 2031, 2019, 2018, 2027),
    *(2017, 2020, 2037, 2028, 2035, 2057, 2064, 2014, 2038, 2045, 2042, 2065, 2062, 2043, 2097),
    *(2052, 2040, 2061, 2053, 2041, 2039, 2046, 2314, 3137, 3194, 3332, 11203, 6967, 3661, 3467),
    *(3006, 2958, 5468, 3871, 2381, 3259, 2193, 3302, 3944, 2090, 2104, 4070, 2352, 6351, 4742),
    *(2189, 2276, 2300, 3635, 2851, 3861, 2689, 2291, 2671, 3114, 2114),
)
"""Tokens of `drawing.WORDS`, in its order."""

RATE = 16000
"""Samples a second."""
STEP, CONTEXT = 512, 64
"""Samples that are new in a step, and those of the step before that precede them."""


def sentence_tokens(
    random: np.random.Generator, length: int, words: tuple[int, int] = (4, 24)
) -> dict[str, Array]:
    """Return `input_ids` and `attention_mask` (1 x `length`, int64) of a sentence of usual words.

    Args:
        random: source of the sentence.
        length: tokens, padding included; two more than the words and the full stop at least.
        words: least and most words.
    """
    count = int(random.integers(words[0], words[1] + 1))
    chosen = [WORD_IDS[int(i)] for i in random.integers(0, len(WORD_IDS), min(count, length - 3))]
    return padded([START, *chosen, FULL_STOP, END], length)


def padded(tokens: list[int], length: int) -> dict[str, Array]:
    """Return `input_ids` and `attention_mask` (1 x `length`, int64) of tokens, padded by zeros."""
    ids, mask = np.zeros((2, 1, length), np.int64)
    ids[0, : len(tokens)] = tokens
    mask[0, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def voice(random: np.random.Generator, samples: int) -> Array:
    """Return `samples` of speech-like sound at 16 kHz, float32 within -1..1.

    Harmonics of a gliding pitch under three formants, in syllables with pauses, and noise below.
    """
    time = np.arange(samples) / RATE
    pitch = random.uniform(90, 220) * (1 + 0.15 * np.sin(2 * np.pi * random.uniform(1, 3) * time))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    formants = (random.uniform(300, 800), random.uniform(900, 2200), random.uniform(2300, 3200))
    sound = np.zeros(samples)
    for harmonic in range(1, 31):
        frequency = harmonic * float(pitch.mean())
        gain = sum(1 / (1 + ((frequency - f) / (0.15 * f)) ** 2) for f in formants)
        sound += gain / harmonic**0.5 * np.sin(harmonic * phase + random.uniform(0, 6.3))
    rhythm = np.sin(2 * np.pi * random.uniform(2, 5) * time + random.uniform(0, 6.3))
    sound *= np.clip(rhythm + 0.4, 0, 1) / max(np.abs(sound).max(), 1e-9)
    loud, floor = random.uniform(0.1, 0.7), random.uniform(0.001, 0.03)
    noise = floor * random.standard_normal(samples)
    return np.clip(loud * sound + noise, -1, 1).astype(np.float32)


def voice_step(random: np.random.Generator) -> dict[str, Array]:
    """Return `input` (1 x 576) from the middle of a voice, and a `state` (2 x 1 x 128) like one.

    A state's first half is between -1 and 1 (the output of the recurrent layer), its second is not.
    """
    cell = 1.5 * random.standard_normal((1, 128))
    state = np.stack([np.tanh(cell) * random.uniform(0, 1, (1, 128)), cell])
    sound = voice(random, 8 * STEP)[-(STEP + CONTEXT) :]
    return {"input": sound[None], "state": state.astype(np.float32)}
