# SPDX-License-Identifier: Apache-2.0
"""What a plan is made of besides its mask: nodes, rates, and advice on its balance."""
