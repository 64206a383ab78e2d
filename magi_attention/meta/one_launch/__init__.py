# SPDX-License-Identifier: Apache-2.0
"""A plan in the coordinates of attention in one launch."""
