# SPDX-License-Identifier: Apache-2.0
"""Attention by ``cudnn.flex_attention`` of the wheel nvidia-cudnn-frontend."""
