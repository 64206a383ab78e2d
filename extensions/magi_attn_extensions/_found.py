# SPDX-License-Identifier: Apache-2.0
"""Fails where another package has the name magi_attention: imported before anything of it is used."""

from importlib.util import find_spec

if find_spec("magi_attention.api") is None:
    raise ImportError(
        "The magi_attention that is found has no api: it is the empty package 0.0.1 of the public index. Run "
        "`pip uninstall magi_attention`, then install the one that this belongs to."
    )
