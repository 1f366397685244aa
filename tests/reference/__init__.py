# SPDX-License-Identifier: Apache-2.0
"""What operators compute, written from the mathematics in NumPy; nothing here uses the library."""
