# SPDX-License-Identifier: Apache-2.0
"""Real documents that every machine has, packed into sequences of equal length.

The documents are the sources of Python's standard library, or the text files under a folder of one's own.
Bytes are the tokens, or what a tokenizer makes of a document. A file is cut at blank lines into documents of
very different lengths: a length is drawn evenly on a logarithmic scale up to `max_document`, and the next blank
line ends the document. What does not fit at the end of a sequence starts the next one, as a document of its own
there.
"""

from __future__ import annotations

import random
import sysconfig
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

TEXT_SUFFIXES = set(".txt .md .rst .tex .py .c .h .cc .cpp .cu .js .ts .html .json .csv".split())
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


class DataError(Exception):
    """There is nothing to train on; the text says what to do."""


@dataclass(frozen=True)
class Batch:
    """One packed sequence: tokens int64 (T,), cu_seqlens the document borders from 0 to T."""

    tokens: Tensor
    cu_seqlens: tuple[int, ...]


def find_files(path: str | None) -> list[Path]:
    """Text files under `path` in the order of their names, or the standard library's sources for None."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not SKIPPED_FOLDERS & set(f.relative_to(root).parts)]
        return sorted(files, key=lambda f: f.relative_to(root).as_posix())
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"--data {path} does not exist; give a text file or a folder that holds text files.")
    if root.is_file():
        return [root]
    files = sorted(f for f in root.rglob("*") if f.is_file() and f.suffix.lower() in TEXT_SUFFIXES)
    if not files:
        suffixes = " ".join(sorted(TEXT_SUFFIXES))
        raise DataError(f"--data {path} holds no text file; files with these endings are read: {suffixes}.")
    return files


def split_text(text: bytes, longest: int, draw: random.Random) -> Iterator[bytes]:
    """Pieces of at most `longest` bytes that end at a blank line where they can."""
    start = 0
    while start < len(text):
        shortest = int(longest ** draw.uniform(0.6, 1.0))
        end = text.find(b"\n\n", start + shortest, start + longest)
        end = min(start + longest, len(text)) if end < 0 else end + 2
        yield text[start:end]
        start = end


def read_documents(path: str | None, seed: int, longest: int) -> Iterator[bytes]:
    """Documents for ever, in an order drawn anew from the seed at every pass over the files."""
    files = find_files(path)
    for epoch in range(1_000_000):
        draw = random.Random(seed * 1_000_003 + epoch)
        order = list(files)
        draw.shuffle(order)
        documents = (d for file in order for d in split_text(file.read_bytes(), longest, draw))
        found = False
        for document in mix(documents, draw):
            found = True
            yield document
        if not found:
            raise DataError(f"The files of --data {path} are all empty; give files with text in them.")


def mix(documents: Iterator[bytes], draw: random.Random, held: int = 1024) -> Iterator[bytes]:
    """The same documents in another order, so that neighbours come from different files."""
    pool: list[bytes] = []
    for document in documents:
        pool.append(document)
        if len(pool) > held:
            place = draw.randrange(len(pool))
            pool[place], pool[-1] = pool[-1], pool[place]
            yield pool.pop()
    draw.shuffle(pool)
    yield from pool


def encoder(tokenizer: str | None) -> Callable[[bytes], Sequence[int]]:
    """What makes tokens of a document: a tokenizer.json of Hugging Face, or bytes as they are for None."""
    if tokenizer is None:
        return bytes
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError("--tokenizer needs tokenizers: pip install tokenizers.") from None
    made = Tokenizer.from_file(tokenizer)
    return lambda text: made.encode(text.decode(errors="replace"), add_special_tokens=False).ids


def packed_batches(
    path: str | None, seq_len: int, seed: int = 0, max_document: int = 2048, tokenizer: str | None = None
) -> Iterator[Batch]:
    """Sequences of exactly `seq_len` tokens; the same on every rank, so nothing has to be sent around."""
    tokens, borders = array("q"), [0]
    encode = encoder(tokenizer)
    for text in read_documents(path, seed, max_document):
        document = encode(text)
        while document:
            taken = document[: seq_len - len(tokens)]
            tokens.extend(taken)
            document = document[len(taken) :]
            borders.append(len(tokens))
            if len(tokens) == seq_len:
                yield Batch(torch.frombuffer(tokens, dtype=torch.int64), tuple(borders))
                tokens, borders = array("q"), [0]


T = TypeVar("T")


def ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """The same items; ``count`` more than were asked for have been begun."""
    begun: deque[T] = deque()
    for item in items:
        begun.append(item)
        if len(begun) > count:
            yield begun.popleft()
    yield from begun
