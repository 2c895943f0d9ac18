"""Fixed numbers of entries a request may bring, so that the compiled step has one shape. More is refused at the border."""

NUM_STOP_IDS = 16
NUM_BIASES = 300
NUM_BAD_STRINGS = 16  # words as the user writes them
NUM_BAD_WORDS = 3 * NUM_BAD_STRINGS  # token sequences: a word has up to three (text.Tokenizer.bad_word_ids)
BAD_WORD_TOKENS = 8
NUM_LOGPROBS = 20
