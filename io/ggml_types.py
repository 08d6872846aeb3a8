"""The ggml tensor types a GGUF can name, and the ones this version reads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One tensor type: `block_values` consecutive values of a row take `block_bytes` bytes."""

    type_id: int
    name: str
    block_values: int
    block_bytes: int


GGML_TYPES: dict[int, GgmlType] = {
    entry[0]: GgmlType(*entry)
    for entry in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}

REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

SUPPORTED_TYPES = (0, 1, 30, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14)
SUPPORTED_NAMES = " ".join(GGML_TYPES[type_id].name for type_id in SUPPORTED_TYPES)


def type_name(type_id: int) -> str:
    """Name of a type, also of removed ones; a number nobody has named yet reads `type N`."""
    known = GGML_TYPES.get(type_id)
    return known.name if known else REMOVED_TYPES.get(type_id, f"type {type_id}")


KINDS = (
    (("IQ",), "an importance quantisation"),
    (("TQ", "Q1_0"), "a ternary or binary quantisation"),
    (("MXFP4", "NVFP4"), "4-bit floating point"),
    (("I8", "I16", "I32", "I64", "F64"), "no type of weights"),
    (("Q8_1", "Q8_K"), "a type of activations"),
)
"""Beginnings of names that are not read, and what such types are."""


def _kind(type_id: int) -> str:
    name = GGML_TYPES[type_id].name
    return next((f" ({what})" for begins, what in KINDS if name.startswith(begins)), "")


def why_unsupported(type_id: int) -> str | None:
    """What to tell the user about a type that is not read, or None when it is."""
    if type_id in SUPPORTED_TYPES:
        return None
    if type_id in REMOVED_TYPES:
        return f"{REMOVED_TYPES[type_id]} (number {type_id}), which was removed from GGUF"
    if type_id in GGML_TYPES:
        return f"{GGML_TYPES[type_id].name} (number {type_id}), which is not read{_kind(type_id)}"
    return f"number {type_id}, which is newer than this version"
