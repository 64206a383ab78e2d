# SPDX-License-Identifier: Apache-2.0
"""The native libraries: building, finding, loading and version-checking them, and mirrors of their structs.

Importing this loads nothing; ``loader.load`` does, at first use.
"""
