"""Two small real vocabularies as GGUF metadata: a byte-level BPE and an SPM with byte fallback."""

from dataclasses import dataclass

from gguf import GGUFWriter, TokenType

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MERGES = (
    "Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġt he", "e r", "a t", "e n", "Ġ s", "Ġ o", "n d",
    "i s", "o r", "Ġa nd", "i t", "in g", "e s", "Ġo f", "o u", "a n", "l l", "h i", "a l", "l o",
    "Ġ w", "o m", "Ġ b", "r o", "Ġw or", "l d", "he l", "hel lo", "Ġwor ld", "t h", "Ġ in", "Ġ i",
    "Ġi s", "Ġt o",
)  # fmt: skip
_PIECES = (
    "▁t", "he", "in", "▁a", "re", "on", "▁the", "er", "at", "en", "▁s", "▁o", "nd", "is", "or",
    "▁and", "it", "ing", "es", "▁of",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TinyVocabulary:
    """Tokens with their types, and what the model of the tokenizer needs beside them."""

    model: str
    pre: str | None
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    bos_id: int
    eos_id: int
    add_bos: bool

    def write(self, writer: GGUFWriter) -> None:
        """Add the tokenizer's metadata to a GGUF being written."""
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types(list(self.token_types))
        if self.merges:
            writer.add_token_merges(list(self.merges))
        if self.scores:
            writer.add_token_scores(list(self.scores))
        writer.add_bos_token_id(self.bos_id)
        writer.add_eos_token_id(self.eos_id)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_space_prefix(self.model == "llama")
        writer.add_chat_template(CHAT_TEMPLATE)


def byte_symbols() -> tuple[str, ...]:
    """GPT-2's printable stand-in of each byte, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    hidden = [byte for byte in range(256) if byte not in symbols]
    symbols.update((byte, chr(256 + rank)) for rank, byte in enumerate(hidden))
    return tuple(symbols[byte] for byte in range(256))


def bpe_vocabulary(pre: str = "smollm") -> TinyVocabulary:
    """299 tokens: 3 control tokens, 256 bytes, 40 merges."""
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokens = (*control, *byte_symbols(), *(merge.replace(" ", "") for merge in _MERGES))
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3)
    return TinyVocabulary(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_types=tuple(int(kind) for kind in types),
        merges=_MERGES,
        scores=(),
        bos_id=1,
        eos_id=2,
        add_bos=False,
    )


def spm_vocabulary() -> TinyVocabulary:
    """Unknown, two control tokens, 256 byte tokens, pieces by score, then single characters."""
    characters = ("▁", *"etaoinsrhldcumfpgwybvkxjqzETAOIN.,!?")
    tokens = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    pieces = (*_PIECES, *characters)
    return TinyVocabulary(
        model="llama",
        pre=None,
        tokens=(*tokens, *pieces),
        token_types=tuple(int(kind) for kind in types + [TokenType.NORMAL] * len(pieces)),
        merges=(),
        scores=(*(0.0 for _ in tokens), *(float(-rank) for rank in range(len(pieces)))),
        bos_id=1,
        eos_id=2,
        add_bos=True,
    )
