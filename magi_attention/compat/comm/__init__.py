# SPDX-License-Identifier: Apache-2.0
"""Published names of collectives and their buffers."""
