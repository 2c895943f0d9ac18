"""How byte-level vocabularies cut a text into words, by the name GGUF files give it in tokenizer.ggml.pre.

The patterns are those of the models' own tokenizer.json files (or of llama.cpp, where it names a rule of its own: "default").
"""

from dataclasses import dataclass

from pagedjax.errors import check

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# letters of alphabets with two cases, as DeepSeek lists them; escaped, because some change when a text is composed to NFC
DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-"
    "\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-"
    "\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-"
    "\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-"
    "\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    DEEPSEEK_CJK,
    r"\p{N}+",
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
DIGITS = (r"\p{N}", GPT2)


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: applied one after the other, each cutting what the one before left. nfc: composed to NFC first.
    whole_words: a word that is a piece needs no merges. add_bos: a BOS is usual, unless the file says otherwise."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


def _table() -> dict[str, PreTokenizer]:
    llama3 = PreTokenizer((LLAMA3,), whole_words=True, add_bos=True)
    groups = {
        ("gpt-2", "phi-2", "exaone4"): PreTokenizer((GPT2,)),
        ("mpt", "olmo"): PreTokenizer((GPT2,), nfc=True),
        ("starcoder", "refact", "smollm", "codeshell", "exaone"): PreTokenizer(DIGITS),
        ("command-r",): PreTokenizer(DIGITS, nfc=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"): llama3,
        ("dbrx", "smaug-bpe"): PreTokenizer((LLAMA3,)),
        ("glm4", "glm5"): PreTokenizer((LLAMA3,), whole_words=True),
        ("chatglm-bpe",): PreTokenizer((LLAMA3,)),
        ("qwen2", "deepseek-r1-qwen"): PreTokenizer((QWEN2,), nfc=True),
        ("stablelm2", "hunyuan", "megrez"): PreTokenizer((QWEN2,)),
        ("qwen35",): PreTokenizer((QWEN35,), nfc=True),
        ("tekken",): PreTokenizer((TEKKEN,), whole_words=True, add_bos=True),
        ("gpt-4o", "llama4"): PreTokenizer((GPT4O,)),
        ("deepseek-llm",): PreTokenizer(DEEPSEEK_LLM),
        ("deepseek-coder",): PreTokenizer(DEEPSEEK_CODER),
        ("deepseek-v3", "hunyuan-dense"): PreTokenizer(DEEPSEEK_V3),
        ("falcon",): PreTokenizer(FALCON),
        ("default",): PreTokenizer(DEFAULT),
    }
    return {name: rule for names, rule in groups.items() for name in names}


TABLE = _table()


def pre_tokenizer(name: object) -> PreTokenizer:
    """The rule of a name; an unknown one is a UserError, because another rule would quietly give other ids."""
    known = isinstance(name, str) and name in TABLE
    check(known, f"tokenizer.ggml.pre must be one of {', '.join(sorted(TABLE))}; got {name!r}")
    return TABLE[str(name)]
