# SPDX-License-Identifier: Apache-2.0
"""What programs check before they call ``magi_attention.functional.fa4``."""
