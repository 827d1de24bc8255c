"""Synthetic clicks in the shape of Criteo's: 13 counts and 26 categories with 10 million values in all.

A category's values come by Zipf's law, so a few are seen all the time and most once, if ever. Whether somebody clicks is drawn
from a hidden model: an effect of each value, effects of pairs of some categories, and the counts. Effects are hashes of the
value: nothing is stored, and every process draws the same world.

Not here: the model that learns it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

COUNTS = 13
#: Values of each category: a few large ones, many small ones.
CARDINALITIES = np.array(
    [4_000_000, 2_500_000, 1_500_000, 900_000, 500_000, 250_000, 150_000, 80_000, 50_000, 30_000, 15_000, 10_000, 6_000]
    + [4_000, 2_000, 1_000, 600, 400, 200, 100, 60, 40, 24, 16, 8, 4]
)
CARDINALITIES[0] += 10_000_000 - CARDINALITIES.sum()
FIELDS = len(CARDINALITIES)
ZIPF = 1.05
#: A value's id: its category above these bits, so that one table holds all of them.
FIELD_BITS = 40

BIAS = -1.6
VALUE_EFFECT = 0.35
PAIR_EFFECT = 0.45
COUNT_EFFECT = 0.15
#: Categories whose pairs matter.
PAIRED = np.arange(6, 22, 2)


class Clicks(NamedTuple):
    """A batch: `counts` float32[n, 13] (their logarithms), `ids` uint64[n, 26], `label` float32[n], and the click's true
    `probability` float32[n], which no model is shown."""

    counts: np.ndarray
    ids: np.ndarray
    label: np.ndarray
    probability: np.ndarray


def draw(size: int, *seed: int) -> Clicks:
    """A batch; the same for the same seed, on every machine."""
    random = np.random.default_rng(seed)
    values = _zipf(random.random((size, FIELDS)), CARDINALITIES)
    ids = (np.arange(FIELDS, dtype=np.uint64) << np.uint64(FIELD_BITS)) | values.astype(np.uint64)
    counts = np.log1p(np.exp(random.normal(1.0, 1.2, (size, COUNTS)))).astype(np.float32)
    logit = BIAS + VALUE_EFFECT * _effect(ids, 1).sum(1)
    paired = [_effect(ids[:, PAIRED], salt) for salt in (2, 3)]
    for effect in paired:
        logit += PAIR_EFFECT * (effect.sum(1) ** 2 - (effect**2).sum(1)) / len(PAIRED)
    logit += COUNT_EFFECT * (counts - 1.5) @ np.where(np.arange(COUNTS) % 2, 1.0, -1.0)
    probability = 1 / (1 + np.exp(-logit))
    label = random.random(size) < probability
    return Clicks(counts, ids, label.astype(np.float32), probability.astype(np.float32))


def _zipf(uniform: np.ndarray, cardinality: np.ndarray) -> np.ndarray:
    """Ranks 0 to cardinality - 1, by the inverse of the distribution's continuous form."""
    power = 1 - ZIPF
    top = (cardinality + 1.0) ** power
    ranks = (1 + uniform * (top - 1)) ** (1 / power)
    return np.minimum(ranks.astype(np.int64) - 1, cardinality - 1)


def _effect(ids: np.ndarray, salt: int) -> np.ndarray:
    """A number of mean 0 and variance 1 for each id: its hash."""
    bits = ids + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return (bits.astype(np.float64) / 2.0**64 - 0.5) * np.sqrt(12.0)
