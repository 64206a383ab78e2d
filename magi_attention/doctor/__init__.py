# SPDX-License-Identifier: Apache-2.0
"""`magi doctor`: what of this machine would keep attention from running, or from running fast, and what mends it.

``system`` looks things up; ``checks`` are functions from a ``System`` to a ``Finding``; ``registry`` lists them.
``pairwise`` runs on every rank of a launch. Nothing here changes the machine.
"""
