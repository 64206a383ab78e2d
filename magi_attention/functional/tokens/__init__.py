# SPDX-License-Identifier: Apache-2.0
"""Tokens in the order of the sequence and in that of the ranks."""
