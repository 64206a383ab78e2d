# SPDX-License-Identifier: Apache-2.0
"""Index attention of a kernel library: its structs and its calls."""
