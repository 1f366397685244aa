# SPDX-License-Identifier: Apache-2.0
"""Times of the library against other libraries and against a copy; see README.md beside this file."""
