# SPDX-License-Identifier: Apache-2.0
"""`magi explain` and `magi simulate`: a plan as text, a page or an estimate."""
