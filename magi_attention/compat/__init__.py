# SPDX-License-Identifier: Apache-2.0
"""What exists only for programs written for the published MagiAttention 1.1.x: its module paths and signatures.

``paths`` has the one table of them. These modules may import every other one and nothing here is imported by them,
so that a name of ours never means what the published one means by it.
"""
