# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels as a backend: calls, plans, what a call leaves for the next one."""
