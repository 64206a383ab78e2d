# SPDX-License-Identifier: Apache-2.0
"""How the rows of a stage travel, and plans that are not run stage by stage over keys."""
