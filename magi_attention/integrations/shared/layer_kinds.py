# SPDX-License-Identifier: Apache-2.0
"""What the layers of a model of transformers see, by its config: all of a document, a window, a chunk."""

from __future__ import annotations

from typing import Any

_CHUNKED, _SLIDING = "chunked_attention", "sliding_attention"


def text_config(config: Any) -> Any:
    """That of the language model, in a model of several kinds of input."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def windows_of(config: Any) -> tuple[int, ...]:
    """The sliding windows of a model's layers, in tokens that a token sees, itself included."""
    text = text_config(config)
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    is_used = _SLIDING in kinds if kinds is not None else getattr(text, "use_sliding_window", True)
    return (window,) if window is not None and is_used else ()


def chunks_of(config: Any) -> tuple[int, ...]:
    """The chunk sizes of layers with chunked attention (Llama 4), in tokens."""
    text = text_config(config)
    return (text.attention_chunk_size,) if _CHUNKED in (getattr(text, "layer_types", None) or ()) else ()


def limits_of(module: Any, sliding_window: int | None) -> tuple[int | None, int | None]:
    """(window, chunk) of the layer of an attention module, None for no limit. ``sliding_window`` is what it said."""
    config, index = text_config(getattr(module, "config", None)), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or index is None or index >= len(kinds):
        return sliding_window, None
    if kinds[index] == _CHUNKED:
        return None, config.attention_chunk_size
    if kinds[index] == _SLIDING and sliding_window is None:
        return getattr(config, "sliding_window", None), None
    return sliding_window, None


def parts_without_text(model: Any) -> list[str]:
    """Names of submodels of another kind of input, which each rank runs whole: they have a config of their own."""
    text, whole = text_config(model.config), model.config
    return [
        name
        for name, module in model.named_modules()
        if name and getattr(module, "config", None) is not None and hasattr(module, "main_input_name")
        and module.config is not text and module.config is not whole
    ]  # fmt: skip
