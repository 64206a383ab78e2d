# SPDX-License-Identifier: Apache-2.0
"""The published sweeps, their tables and plots. matplotlib and pandas are imported only when used."""
