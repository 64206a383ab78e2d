# SPDX-License-Identifier: Apache-2.0
"""Leaves for frameworks. Each imports its framework, so none is imported here."""
