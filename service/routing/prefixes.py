"""Which replicas have computed the beginning of a prompt, as far as one router has sent it there."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

BLOCK_CHARACTERS = 2048
MOST_BLOCKS = 32
"""Of one prompt: what is longer is told apart by its beginning alone."""
MOST_KNOWN = 20_000


def beginning(prompt: Any) -> tuple[int, ...]:
    """A hash for each whole block of a prompt's beginning, each with all before it. `prompt` is text, or what
    JSON has in its place: tokens, messages."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    hashes: list[int] = []
    for number in range(min(len(text) // BLOCK_CHARACTERS, MOST_BLOCKS)):
        block = text[number * BLOCK_CHARACTERS : (number + 1) * BLOCK_CHARACTERS]
        hashes.append(hash((hashes[-1] if hashes else 0, block)))
    return tuple(hashes)


class Prefixes:
    """The most recent blocks and who got them. What a replica has dropped from its cache is not known."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[int, set[str]] = OrderedDict()

    def sent(self, blocks: Sequence[int], replica: str) -> None:
        for block in blocks:
            self._replicas.setdefault(block, set()).add(replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > MOST_KNOWN:
            self._replicas.popitem(last=False)

    def characters(self, blocks: Sequence[int]) -> dict[str, int]:
        """How much of the prompt each replica has had, where it has had any."""
        had: dict[str, int] = {}
        for number, block in enumerate(blocks, 1):
            for replica in self._replicas.get(block, ()):
                had[replica] = number * BLOCK_CHARACTERS
        return had
