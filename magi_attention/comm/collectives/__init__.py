# SPDX-License-Identifier: Apache-2.0
"""Group cast and group reduce over a transport."""
