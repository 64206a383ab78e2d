# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch per direction, over NVLink or over nodes."""
