# SPDX-License-Identifier: Apache-2.0
"""Group casts over nodes: a row that several ranks of a node need goes there once, and is multiplied inside it."""
