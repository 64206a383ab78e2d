# SPDX-License-Identifier: Apache-2.0
"""Moves and sums of rows of tensors."""
