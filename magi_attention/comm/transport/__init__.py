# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: messages, streams, failures."""
