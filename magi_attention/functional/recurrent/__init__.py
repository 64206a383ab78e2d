# SPDX-License-Identifier: Apache-2.0
"""Layers that carry a state from token to token, over the fragments of a plan: exchange of states, halo of causal
convolutions, and the change to contiguous shards and back. No kernels: those of libraries run within a fragment."""
