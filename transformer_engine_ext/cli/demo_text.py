# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The text that the demo trains on, as characters.

``data/american_documents.txt`` holds the Declaration of Independence (1776), the Constitution's preamble (1787) and
first ten amendments (1791), the Gettysburg Address (1863) and Lincoln's second inaugural address (1865): works of the
United States government and older than any copyright, so in the public domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

__all__ = ["SOURCE", "Corpus", "load_corpus"]

#: What the text is, for the demo's output.
SOURCE = "Declaration of Independence, Bill of Rights, Gettysburg Address, Lincoln's second inaugural (public domain)"


@dataclass(frozen=True)
class Corpus:
    """A text as one tensor of character numbers.

    Attributes
    ----------
    tokens : torch.Tensor
        ``int64 [characters]`` on the CPU.
    alphabet : str
        The characters, in the order of their numbers.
    """

    tokens: Tensor
    alphabet: str

    def batch(self, size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return random excerpts and the same shifted by one, both ``int64 [size, length]`` on the CPU.

        Drawn from a generator of its own, so that data costs the job's streams nothing.
        """
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.tokens) - length - 1, (size, 1), generator=generator)
        index = starts + torch.arange(length)
        return self.tokens[index], self.tokens[index + 1]


def load_corpus() -> Corpus:
    """Read the shipped text."""
    text = files("transformer_engine_ext.cli").joinpath("data/american_documents.txt").read_text(encoding="ascii")
    alphabet = "".join(sorted(set(text)))
    number = {character: index for index, character in enumerate(alphabet)}
    return Corpus(torch.tensor([number[character] for character in text]), alphabet)
