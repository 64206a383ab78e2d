# SPDX-License-Identifier: Apache-2.0
"""What the leaves share, without a framework: examples of a data set, kinds of layers, documents of a packed batch."""
