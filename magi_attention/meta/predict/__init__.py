# SPDX-License-Identifier: Apache-2.0
"""What a plan costs before it runs: bytes, times and memory."""
