# SPDX-License-Identifier: Apache-2.0
"""Published forms of keys and managers."""
