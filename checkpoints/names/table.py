"""The entry of a name table."""

from dataclasses import dataclass
from typing import Literal

# plus_one: 1 is added (norm weights stored less one). unpermute: the rows of each head are put back from adjacent rotary pairs
# (2i, 2i + 1) to the halves (i, i + D/2) that our rotation uses.
Transform = Literal["same", "plus_one", "unpermute"]


@dataclass(frozen=True)
class Name:
    """A weight's name in each format, `{n}` standing for the layer, and what is done to its values at load."""

    hf: str
    gguf: str
    hf_transform: Transform = "same"
    gguf_transform: Transform = "same"
