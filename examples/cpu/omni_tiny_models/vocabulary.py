# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The tiny tokenizer's vocabulary, shared by its builder and the model that reads tokens.

Ids, in this order: 256 bytes, which is all that a prompt's text is made of; the words that
the model answers with; one "slow" word a stage; chat and fault marks.
"""

from __future__ import annotations

from collections.abc import Iterable

from omni_tiny_models.faults import KINDS, RANKS, ROUTING, STAGES, mark

_BYTES = 256


def _byte_alphabet() -> list[tuple[str, int]]:
    """The printable character that byte-level tokenizers write for each byte, sorted by it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_BYTES) if byte not in printable]
    pairs = [(chr(byte), byte) for byte in printable]
    pairs += [(chr(_BYTES + i), byte) for i, byte in enumerate(others)]
    return sorted(pairs)


BYTE_TOKENS = tuple(character for character, _ in _byte_alphabet())
_BYTE_OF_TOKEN = tuple(byte for _, byte in _byte_alphabet())

WORDS = tuple(
    """
    amber anchor apple arrow autumn basil beacon birch bloom breeze bridge brook candle canyon
    cedar cherry cloud clover cobalt comet copper coral cotton creek crystal dawn delta desert
    dune ember falcon feather fern field flint forest garden ginger glacier grove harbor hazel
    heron honey indigo island ivory jasper juniper lagoon lantern lark laurel lemon lily linen
    lotus lunar maple marble meadow mint mist moss nectar north oak ocean olive onyx opal orchid
    otter pearl pebble pepper pine planet plum poppy prairie quartz quill rain raven reef ridge
    river robin rose saffron sage sand shadow silver sky slate snow solar south spruce star stone
    storm summer sun swift thistle thunder tide timber tulip valley velvet violet walnut water
    willow wind winter wren zephyr
    """.split()
)

END_OF_TEXT = "<|endoftext|>"
CHAT_START = "<|im_start|>"
CHAT_END = "<|im_end|>"

# What is answered instead of a word while a request is slow: a token that no text encodes
# to, so that a decode step shows by its input alone that its request is slow, and where.
SLOW_WORDS = tuple(f"slow{stage}" for stage in STAGES)

FIRST_WORD = _BYTES
FIRST_SLOW_WORD = FIRST_WORD + len(WORDS)
FIRST_SPECIAL = FIRST_SLOW_WORD + len(SLOW_WORDS)

# A slow step is a matter of all ranks: one that sleeps keeps the others waiting anyway.
_FAULTS = tuple(
    (kind, stage, rank)
    for rank in (None, *RANKS)
    for stage in STAGES
    for kind in KINDS
    if rank is None or kind not in ("slow", *ROUTING)
)
SPECIALS = (END_OF_TEXT, CHAT_START, CHAT_END, *(mark(*fault) for fault in _FAULTS))

FAULT_BY_TOKEN = {FIRST_SPECIAL + SPECIALS.index(mark(*fault)): fault for fault in _FAULTS}
SLOW_WORD_ID = {stage: FIRST_SLOW_WORD + i for i, stage in enumerate(STAGES)}
CHAT_END_ID = FIRST_SPECIAL + SPECIALS.index(CHAT_END)
END_OF_TEXT_ID = FIRST_SPECIAL + SPECIALS.index(END_OF_TEXT)
SIZE = FIRST_SPECIAL + len(SPECIALS)


def text_of(token_ids: Iterable[int]) -> str:
    """The text that tokens stand for, marks included, without a tokenizer at hand."""
    parts = bytearray()
    for token in token_ids:
        if token < FIRST_WORD:
            parts.append(_BYTE_OF_TOKEN[token])
        elif token < FIRST_SPECIAL:
            parts += f" {(*WORDS, *SLOW_WORDS)[token - FIRST_WORD]}".encode()
        else:
            parts += SPECIALS[token - FIRST_SPECIAL].encode()
    return parts.decode(errors="replace")
