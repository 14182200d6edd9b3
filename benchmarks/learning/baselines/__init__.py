# SPDX-License-Identifier: MIT
"""Schemes of others, written from their papers. What a scheme is: schemes.py."""
