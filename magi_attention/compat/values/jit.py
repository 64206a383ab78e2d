# SPDX-License-Identifier: Apache-2.0
"""The published package compiles its kernels on first use from here. Ours are compiled ahead of time, and what is
missing then by ``magi_attention.kernels`` when it is first asked for, so that nothing is left to do.
"""
