# SPDX-License-Identifier: Apache-2.0
"""`magi profile`: ``record`` runs a script under torch's profiler, ``trace`` reads what it wrote, ``page`` shows it."""
