# SPDX-License-Identifier: Apache-2.0
"""The published key API: a key says what is planned, a manager of it runs."""
