# SPDX-License-Identifier: Apache-2.0
"""The version, in one place; pyproject.toml reads it from here."""

__version__ = "1.1.1"
