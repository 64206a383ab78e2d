# SPDX-License-Identifier: Apache-2.0
"""The published package compiles its kernels on first use from here. Ours are compiled ahead of time, so
that nothing is left to do; ``magi_attention.kernels`` finds and loads them.
"""
