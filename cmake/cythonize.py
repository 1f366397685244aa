# SPDX-License-Identifier: Apache-2.0
"""Runs Cython with the arguments given and fails on its performance hints.

Cython has no switch for that: a hint (an implicit exception check that takes the GIL, say) is only
printed.
"""

import subprocess
import sys

run = subprocess.run([sys.executable, "-m", "cython", *sys.argv[1:]], stderr=subprocess.PIPE, text=True, check=False)
sys.stderr.write(run.stderr)
sys.exit(run.returncode or ("performance hint" in run.stderr))
