# SPDX-License-Identifier: Apache-2.0
"""Attention that lists choose: blocks of keys, or single keys of each query; on one device and over a group."""
