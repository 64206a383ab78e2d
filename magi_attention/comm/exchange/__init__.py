# SPDX-License-Identifier: Apache-2.0
"""Group casts and reduces over nodes by one-sided transfers: puts with a signal, and waits for signals."""
