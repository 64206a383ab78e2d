# SPDX-License-Identifier: Apache-2.0
"""The published dynamic solver: its algorithms, its class and its picture."""
