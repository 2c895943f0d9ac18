"""Models of the goldens of beam search, without weights: their logits are a formula of the last two tokens."""

import numpy as np

VOCAB = 23
PROMPT = (3, 7)


def toy_logits(model: int) -> np.ndarray:
    """f64[VOCAB, VOCAB, VOCAB]: logits after (last but one, last) token. Token 5, a stop id, is a little likelier than others."""
    a, b, c = np.meshgrid(*[np.arange(VOCAB)] * 3, indexing="ij")
    mixed = 7919 * model + 311 * a + 1009 * b + 97 * c
    return (mixed * mixed % 4099 + mixed * 31 % 1021 + 1500 * (c == 5) + 0.137 * c) / 1000.0  # 0.137: no ties
