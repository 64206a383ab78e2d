# SPDX-License-Identifier: Apache-2.0
"""In which order the backward takes up its work tiles, how large its steps are and what is split."""
