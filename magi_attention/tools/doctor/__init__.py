# SPDX-License-Identifier: Apache-2.0
"""`magi doctor`: what of this machine would keep attention from running, or from running fast, and what mends it.

``system`` looks things up; ``checks`` are functions from a ``System`` to a ``Finding``; ``registry`` lists them.
``benchmarking.collective`` is what runs on every rank for ``--pairwise``. Nothing here changes the machine.
"""
