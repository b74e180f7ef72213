# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The forms of the tables: a seam, a use of upstream's objects, a table of both. Data alone.

Names are ``module:attribute.path``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """A name of upstream's that is taken: what replaces it, and why that is needed."""

    target: str
    replacement: str
    why: str
    signature: str = ""
    """Of a function, as :func:`vllm_omni.health.seams.check.signature_of` has it."""
    new: bool = False
    """Whether upstream must *not* have the attribute: it is assigned on instances there."""


@dataclass(frozen=True)
class Use:
    """What is used of upstream's objects of one kind, and what our subclass overrides.

    ``members``: a name a line, with its signature where it is a function; ``async`` goes in front.
    With a subclass each of the classes has all of them. Without, the classes are kinds of one
    thing, told apart where it is used, and one of them has it.
    ``seen_as``: what such objects are called in our sources, ``module: expression, expression``;
    within a subclass it is ``self`` as well.
    """

    upstream: tuple[str, ...]
    members: str
    subclass: str = ""
    seen_as: tuple[str, ...] = ()

    def declared(self) -> dict[str, str]:
        """Members with their signatures, which are empty where only the name counts."""
        found = {}
        text = ""
        for line in self.members.split("\n"):
            text = f"{text} {line.strip()}".strip()
            if not text or text.count("(") > text.count(")"):
                continue
            name, bracket, parameters = text.partition("(")
            *prefix, name = name.split()
            found[name] = " ".join((*prefix, bracket + parameters)) if bracket else ""
            text = ""
        return found


@dataclass(frozen=True)
class Table:
    """What one kind of process takes, and what it relies on."""

    seams: tuple[Seam, ...]
    uses: tuple[Use, ...] = ()
