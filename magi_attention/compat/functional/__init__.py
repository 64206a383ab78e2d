# SPDX-License-Identifier: Apache-2.0
"""The published modules of ``functional`` that only programs written for it import."""
