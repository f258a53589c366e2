"""`python -m tests.nightly.pretend_cuda GUARD CASES`: load the guard, torch, and run `trial`."""

import ctypes
import runpy
import sys

ctypes.CDLL(sys.argv[1])
runpy.run_module("tests.nightly.pretend_cuda.trial", run_name="__main__")
