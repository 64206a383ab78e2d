# SPDX-License-Identifier: Apache-2.0
"""The mask of `magi explain` and `magi simulate`: from options, from a JSON file of slices, or from a dense picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from magi_attention.cli.common import UsageError, token_count
from magi_attention.errors import MagiError
from magi_attention.tools.launch.textfile import read_text

MASKS = ("causal", "full", "sliding-window", "block-causal", "prefix-lm")
BLOCK = 1024  # default of --block
_MASK_KEYS = ("total", "q_ranges", "k_ranges", "types")
_LENGTHS = ("tokens", "docs", "doc_file")
_MASK_OF = {
    "window": "sliding-window", "global_prefix": "sliding-window", "block": "block-causal", "prefix": "prefix-lm",
}  # fmt: skip


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """A kind of mask and document lengths."""
    parser.add_argument("--mask", choices=MASKS, help="inside every document; causal without it")
    parser.add_argument("--docs", help="document lengths, such as 1000,4000,3192 or 30K,2K")
    parser.add_argument("--doc-file", help="text file of document lengths")
    parser.add_argument("--window", type=token_count, help="sliding-window: tokens before the query")
    parser.add_argument("--global-prefix", type=token_count, help="sliding-window: tokens all can see; 0 without it")
    parser.add_argument("--block", type=token_count, help=f"block-causal: tokens per block; {BLOCK} without it")
    parser.add_argument("--prefix", type=token_count, help="prefix-lm: tokens of the prefix; 0 without it")


def read_mask(path: Path):
    """Mask of a file: slices as JSON, or one cell for each pair as `.npy` or `.png`."""
    readers = {".npy": _read_array, ".png": _read_picture}
    return readers.get(path.suffix.lower(), _read_slices)(path)


def _read_slices(path: Path):
    """Mask of a JSON file with the keys total, q_ranges, k_ranges and types."""
    from magi_attention.api import Mask
    from magi_attention.common.scalars import as_int

    text = read_text(path, "The mask file", UsageError)
    try:
        data = json.loads(text)
        if unknown := [key for key in data if key not in _MASK_KEYS]:
            raise TypeError(f"unknown key {unknown[0]!r}")
        q_ranges, k_ranges, types = data["q_ranges"], data["k_ranges"], data.get("types", "full")
        total = as_int(data["total"], "total")
        return Mask.from_slices(q_ranges, k_ranges, types, total, total).check()
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UsageError(
            f'{path} is no mask ({error}); it must hold {{"total": N, "q_ranges": [[start, end], ...], '
            '"k_ranges": [[start, end], ...], "types": ["full", "causal", "inv_causal" or "bi_causal", ...]}.'
        ) from None
    except MagiError as error:
        raise UsageError(f"{path}: {error}") from None


def _read_array(path: Path):
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"The mask file {path} cannot be read: {error}. Write it with numpy.save.") from None
    from magi_attention.common.scalars import as_bools

    try:
        array = as_bools(array, "The array")
    except MagiError as error:
        raise UsageError(f"{path} is no mask: {error}") from None
    return _dense(path, array, (0, 1), "True (or 1) where a query sees a key, and False (or 0) elsewhere")


def _read_picture(path: Path):
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UsageError("A mask as a picture needs pillow; install it with `pip install pillow`.") from None
    try:
        with Image.open(path) as image:
            array = np.asarray(image.convert("L"))
    except (OSError, UnidentifiedImageError) as error:
        raise UsageError(f"The mask file {path} cannot be read: {error}. Give a PNG picture.") from None
    return _dense(path, array, (0, 255), "white where a query sees a key, and black elsewhere")


def _dense(path: Path, array: np.ndarray, values: tuple[int, int], meaning: str):
    """The mask of a square array of two values; a row is a query."""
    from magi_attention.api import Mask

    is_square = array.ndim == 2 and array.shape[0] == array.shape[1]
    if not is_square or array.size == 0 or not np.isin(array, values).all():
        shape = " x ".join(map(str, array.shape))
        raise UsageError(
            f"{path} is no mask ({shape}, {array.dtype}); it must be square, a row for each query and a column for "
            f"each key, {meaning}."
        )
    return Mask.from_dense(array != 0)


def check_options(args: argparse.Namespace) -> None:
    """``UsageError`` for an option that the chosen mask would leave unread, and for two that say the same."""
    given = [name for name in (*_LENGTHS, "mask", *_MASK_OF) if getattr(args, name) is not None]
    if args.mask_file and given:
        raise UsageError(f"{_option(given[0])} and --mask-file exclude each other: the file holds the whole mask.")
    if args.docs is not None and args.doc_file is not None:
        raise UsageError("--docs and --doc-file both say how long the documents are; keep one of them.")
    mask = args.mask or "causal"
    for name, wanted in _MASK_OF.items():
        if name in given and mask != wanted:
            raise UsageError(f"{_option(name)} is for --mask {wanted}, and the mask is {mask}; drop one of them.")
    if args.out is not None and not args.pictures:
        raise UsageError("--out is the folder of the page, and --no-pictures makes none; drop one of them.")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def document_lengths(args: argparse.Namespace) -> list[int]:
    """Lengths from --docs or --doc-file, or one document of --tokens."""
    text = args.docs
    if args.doc_file is not None:
        text = read_text(Path(args.doc_file), "The file of --doc-file", UsageError)
    if text is None:
        if args.tokens is None:
            raise UsageError("Say how long the sequence is: --tokens, --docs, --doc-file or --mask-file.")
        return [args.tokens]
    try:
        lengths = [token_count(word) for word in text.replace(",", " ").split()]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"The document lengths must be whole numbers, comma or space between: {error}.") from None
    if not lengths or min(lengths) < 1:
        raise UsageError("Give at least one document, and each with at least one token.")
    if args.tokens is not None and args.tokens != sum(lengths):
        raise UsageError(f"--tokens is {args.tokens}, the documents have {sum(lengths)}; leave --tokens out.")
    return lengths


def build_mask(args: argparse.Namespace):
    from magi_attention.api import Mask

    if args.mask_file:
        return read_mask(Path(args.mask_file))
    cu_seqlens = [0]
    for length in document_lengths(args):
        cu_seqlens.append(cu_seqlens[-1] + length)
    if args.mask == "sliding-window":
        if args.window is None:
            raise UsageError("--mask sliding-window needs --window, the tokens that a query sees before itself.")
        return Mask.varlen(cu_seqlens, window=(args.window, 0), global_prefix=args.global_prefix or 0)
    if args.mask == "block-causal":
        return Mask.block_causal(cu_seqlens, BLOCK if args.block is None else args.block)
    if args.mask == "prefix-lm":
        return Mask.prefix_lm(cu_seqlens, args.prefix or 0)
    return Mask.varlen(cu_seqlens, causal=args.mask != "full")
