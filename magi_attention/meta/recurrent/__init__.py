# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over a plan, as tables: which rows and states go where, and how many bytes each way moves."""
