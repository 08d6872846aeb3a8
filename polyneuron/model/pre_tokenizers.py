"""How byte-level BPE vocabularies cut text into words before merging, one line a kind.

`tokenizer.ggml.pre` names the kind. Patterns are applied one after the other, each to the pieces
the one before left; a match is a piece and so is what lies between two matches. The patterns are
those of each model's own tokenizer.json.
"""

from dataclasses import dataclass

from polyneuron.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns of one kind of vocabulary, and the settings that come with it."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token as a whole is not merged up
    add_bos: bool = False  # when the file does not say


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_NEWLINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PUNCTUATION_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _NEWLINES
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_NEWLINES}"
)
_SEED_CODER = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_NEWLINES}"
)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASH_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_NEWLINES}"
_TEKKEN = rf"{_CASED_WORD}|{_UPPER_WORD}|\p{{N}}|{_SLASH_TAIL}"
_GPT4O = rf"{_CASED_WORD}{_CONTRACTION}?|{_UPPER_WORD}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001  the marks themselves are the pattern

# The cased letters as DeepSeek's first models list them; the engine knows \u and \x{...}, not \U.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    r"\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    r"\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    r"\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    r"\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    r"\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    r"\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    r"\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    r"\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}"
    r"\x{1e900}-\x{1e943}]+"
)
_DEEPSEEK_MARKS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_NEWLINES}"
)

_LLAMA3_KIND = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_PLAIN = PreTokenizer((_LLAMA3,))
_QWEN2_KIND = PreTokenizer((_QWEN2,))
_GPT2_KIND = PreTokenizer((_GPT2,))
_DIGITS_KIND = PreTokenizer((r"\p{N}", _GPT2))
_BLOOM_KIND = PreTokenizer((_BLOOM,))
_BAILING_KIND = PreTokenizer((_BAILING,))
_GPT4O_KIND = PreTokenizer((_GPT4O,))
_DEEPSEEK3_KIND = PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3_WORDS))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {  # tokenizer.ggml.pre -> kind
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "falcon3": _LLAMA3_KIND,
    "falcon-h1": _LLAMA3_KIND,
    "pixtral": _LLAMA3_KIND,
    "midm-2.0": _LLAMA3_KIND,
    "lfm2": _LLAMA3_KIND,
    "dbrx": _LLAMA3_PLAIN,
    "smaug-bpe": _LLAMA3_PLAIN,
    "glm4": _LLAMA3_PLAIN,
    "chatglm-bpe": _LLAMA3_PLAIN,
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "kormo": _QWEN2_KIND,
    "megrez": _QWEN2_KIND,
    "stablelm2": _QWEN2_KIND,
    "qwen35": PreTokenizer((_QWEN35,)),
    "gpt-2": _GPT2_KIND,
    "phi-2": _GPT2_KIND,
    "mpt": _GPT2_KIND,
    "olmo": _GPT2_KIND,
    "jais": _GPT2_KIND,
    "gigachat": _GPT2_KIND,
    "a.x-4.0": _GPT2_KIND,
    "mellum": _GPT2_KIND,
    "exaone4": _GPT2_KIND,
    "trillion": _GPT2_KIND,
    "smollm": _DIGITS_KIND,
    "starcoder": _DIGITS_KIND,
    "refact": _DIGITS_KIND,
    "command-r": _DIGITS_KIND,
    "codeshell": _DIGITS_KIND,
    "exaone": _DIGITS_KIND,
    "minerva-7b": _DIGITS_KIND,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
    ),
    "deepseek-v3": _DEEPSEEK3_KIND,
    "hunyuan-dense": _DEEPSEEK3_KIND,
    "joyai-llm": _DEEPSEEK3_KIND,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O_KIND,
    "llama4": _GPT4O_KIND,
    "kanana2": _GPT4O_KIND,
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bailingmoe": _BAILING_KIND,
    "bailingmoe2": _BAILING_KIND,
    "llada-moe": _BAILING_KIND,
    "bloom": _BLOOM_KIND,
    "gpt3-finnish": _BLOOM_KIND,
    "poro-chat": _BLOOM_KIND,
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}


OWN_KINDS = {"opt": PreTokenizer((_GPT2,), add_bos=True), "falcon": PRE_TOKENIZERS["falcon"]}
"""general.architecture -> the kind of files that name none; all its models have one vocabulary."""


def find_pre_tokenizer(name: str | None, place: str, architecture: str = "") -> PreTokenizer:
    """Return the kind called `name`; `place` (the file) goes into the error."""
    if name is None and architecture in OWN_KINDS:
        return OWN_KINDS[architecture]
    if name is None:
        raise UnsupportedError(
            f"{place}tokenizer.ggml.pre is missing: the file predates this field, and guessing it "
            f"gives wrong tokens; convert the model again with a current converter"
        )
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"{place}tokenizer.ggml.pre: unknown '{name}'; known: {known}")
    return kind
