"""Fixed numbers of entries a request may bring, so that the compiled step has one shape. More is refused at the border."""

NUM_STOP_IDS = 16
NUM_BIASES = 300
NUM_BAD_WORDS = 16
BAD_WORD_TOKENS = 8
NUM_LOGPROBS = 20
