# SPDX-License-Identifier: Apache-2.0
"""The version: that of magi_attention, to which a test holds it."""

__version__ = "1.1.1"
